"""Sums over a batch: each example clipped by its own norm, in one reading where a backend can, else in two."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gradclip.backends import Backend
from gradclip.backends.arrays import Arrays
from gradclip.backends.formats import FLOAT64
from gradclip.backends.protocols import Array
from gradclip.backends.sums import ENOUGH, examples_sum_error
from gradclip.core.coefficient import exceeds, rule_for_sums, settled
from gradclip.core.decide import Clipping, decide
from gradclip.core.norms import Norm, relative_error
from gradclip.core.scopes import EXAMPLE

if TYPE_CHECKING:
    from gradclip.core.holders import Holders


@dataclass(frozen=True)
class Summed:
    """What became of a batch: the wide sums over its examples, their norms, which of them count as clipped."""

    sums: Sequence[Any]
    norm: Norm
    clipped: Any


def clip_and_sum(
    backend: Backend,
    arrays: Arrays,
    clipping: Clipping,
    names: Callable[[], Sequence[str]],
    mask: Array | None,
    holders: "Holders",
) -> Summed:
    """Clip each example of a batch by its own norm and add them up; `names` and `mask` are as in `decide`."""
    summed = _in_one_reading(backend, arrays, clipping, names, mask, holders)
    return _in_two_readings(backend, arrays, clipping, names, mask, holders) if summed is None else summed


def _in_two_readings(
    backend: Backend,
    arrays: Arrays,
    clipping: Clipping,
    names: Callable[[], Sequence[str]],
    mask: Array | None,
    holders: "Holders",
) -> Summed:
    made = decide(backend, arrays, clipping, names, scope=EXAMPLE, mask=mask, holders=holders)
    add = backend.rounded_sum if clipping.target.integers else backend.weighted_sum
    sums = [add(x, made.coefficient) for x in made.arrays]
    threshold = backend.scalar(clipping.max_norm, arrays)
    clipped = exceeds(settled(backend, made.norm), threshold) & ~made.coefficient.keep
    return Summed(sums, made.norm, clipped)


# Layers of one size and threshold are weighed alike, which takes longer to find out than to add up a small layer.
_known_rule = lru_cache(maxsize=64)(rule_for_sums)


def _in_one_reading(
    backend: Backend,
    arrays: Arrays,
    clipping: Clipping,
    names: Callable[[], Sequence[str]],
    mask: Array | None,
    holders: "Holders",
) -> Summed | None:
    """Clip and add up in one reading, where the backend can; None where it cannot.

    Examples whose sums of squares cannot be trusted are read again, apart from the others: so what an example adds does
    not depend on the others.
    """
    count = arrays.sharing(EXAMPLE)
    if clipping.target.integers or not count or not (backend.concrete or _always_trusted(arrays, clipping)):
        return None
    error = relative_error(clipping.order, examples_sum_error(count), FLOAT64, exact=False)
    if backend.concrete:
        rule = _known_rule(backend.xp, clipping.target, float(clipping.max_norm), error)
    else:
        rule = rule_for_sums(backend.xp, clipping.target, clipping.max_norm, error)
    found = backend.add_examples(arrays, rule, mask)
    if found is None:
        return None
    sums, squares = found
    norm = Norm(backend.xp.sqrt(squares), None, error, 0.0)
    summed = Summed(sums, norm, exceeds(norm, clipping.max_norm))
    if _always_trusted(arrays, clipping):
        return summed
    trusted = backend.xp.isfinite(squares) & (squares > ENOUGH if FLOAT64 in arrays.formats else True)
    others = ~trusted if mask is None else ~trusted & mask
    if not backend.xp.any(others):
        return summed
    apart = _in_two_readings(backend, arrays, clipping, names, others, holders)
    # Sums of squares beyond the range added nothing; what was too small to be trusted is added a second time.
    counted = backend.add_examples(arrays, rule, trusted if mask is None else trusted & mask)
    assert counted is not None
    xp = backend.xp
    norm = replace(norm, value=xp.where(others, apart.norm.product(), norm.value))
    clipped = xp.where(others, apart.clipped, summed.clipped)
    return Summed([a + b for a, b in zip(counted[0], apart.sums, strict=True)], norm, clipped)


def _always_trusted(arrays: Arrays, clipping: Clipping) -> bool:
    """Say whether no sum of squares leaves the range, and examples that are not finite are to be left out."""
    return FLOAT64 not in arrays.formats and clipping.nonfinite.blanks

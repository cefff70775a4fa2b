"""From arrays and a threshold to a norm and a coefficient: the one path that every way of clipping takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from gradclip.backends import Backend
from gradclip.backends.arrays import Arrays
from gradclip.backends.formats import FLOAT64
from gradclip.backends.sums import ENOUGH, examples_sum_error
from gradclip.coefficient import (
    Coefficient,
    Target,
    coefficient,
    exceeds,
    needs_split,
    rule_for_sums,
    settled,
    undecided,
)
from gradclip.holders import ALONE, Holders
from gradclip.norms import Norm, Order, measure, relative_error
from gradclip.policy import Nonfinite
from gradclip.scopes import EXAMPLE, TREE, Scope


@dataclass(frozen=True)
class Clipping:
    """What is asked for: a threshold that has been checked, an order, what happens to NaN and infinities, a target."""

    max_norm: Any
    order: Order
    nonfinite: Nonfinite
    target: Target


@dataclass(frozen=True)
class Decision:
    """What was measured and what follows: the norm, the coefficient, what counts as clipped, the arrays to scale."""

    norm: Norm
    coefficient: Coefficient
    clipped: Any
    arrays: Arrays


def decide(
    backend: Backend,
    arrays: Arrays,
    clipping: Clipping,
    names: Callable[[], Sequence[str]],
    *,
    scope: Scope = TREE,
    mask: Any = None,
    holders: Holders = ALONE,
) -> Decision:
    """Measure the norm of `arrays` together (or each norm of the scope) and decide what happens to them.

    `names` returns what the arrays are called in an error; examples outside of `mask` count as zeros, whatever they
    hold; `holders` are those of the whole, of which `arrays` may be a part. Raises FloatingPointError under the policy
    "raise".
    """
    clipping.nonfinite.check_visible(backend)
    arrays, norm = _settled(backend, arrays, clipping, scope, mask, holders)
    finite = backend.xp.isfinite(norm.value)
    if clipping.nonfinite.raises and not backend.xp.all(finite):
        holders.raise_nonfinite(backend, arrays, names())
    made = _decided(backend, arrays, clipping, norm, finite, holders)
    if mask is None:
        return made
    chosen = replace(made.coefficient, blank=made.coefficient.blank | ~mask, keep=made.coefficient.keep & mask)
    return replace(made, coefficient=chosen)


def decide_each(
    backend: Backend, groups: Sequence[Arrays], clipping: Clipping, holders: Holders
) -> tuple[Norm, Coefficient, list[Any]]:
    """Decide for many groups of traced arrays at once: return norms, coefficients, as vectors, and the arrays to scale.

    A threshold is one for all of them, or a vector.
    """
    clipping.nonfinite.check_visible(backend)
    norm = holders.measure_each(backend, groups, clipping.order)
    if clipping.nonfinite.zeroes:
        groups = list(map(backend.without_nonfinite, groups))
        norm = holders.measure_each(backend, groups, clipping.order)
    arrays = Arrays([x for group in groups for x in group])
    made = _decided(backend, arrays, clipping, norm, backend.xp.isfinite(norm.value), holders)
    return norm, made.coefficient, list(arrays)


def _decided(
    backend: Backend, arrays: Arrays, clipping: Clipping, norm: Norm, finite: Any, holders: Holders
) -> Decision:
    threshold = backend.scalar(clipping.max_norm, arrays)
    in_range = settled(backend, norm)
    chosen = _chosen(backend, arrays, clipping, in_range, threshold, holders)
    clipped = exceeds(in_range, threshold) & ~chosen.keep
    return Decision(norm, clipping.nonfinite.settled(backend, finite, chosen), clipped, arrays)


@dataclass(frozen=True)
class Summed:
    """What became of a batch: the wide sums over its examples, their norms, which of them count as clipped."""

    sums: list[Any]
    norm: Norm
    clipped: Any


def clip_and_sum(
    backend: Backend, arrays: Arrays, clipping: Clipping, names: Callable[[], Sequence[str]], mask: Any
) -> Summed:
    """Clip each example of a batch by its own norm and add them up; `names` and `mask` are as in `decide`."""
    summed = _in_one_reading(backend, arrays, clipping, names, mask)
    return _in_two_readings(backend, arrays, clipping, names, mask) if summed is None else summed


def _in_two_readings(
    backend: Backend, arrays: Arrays, clipping: Clipping, names: Callable[[], Sequence[str]], mask: Any
) -> Summed:
    made = decide(backend, arrays, clipping, names, scope=EXAMPLE, mask=mask)
    add = backend.rounded_sum if clipping.target.integers else backend.weighted_sum
    sums = [add(x, made.coefficient) for x in made.arrays]
    return Summed(sums, made.norm, made.clipped)


# Layers of one size and threshold are weighed alike, which takes longer to find out than to add up a small layer.
_known_rule = lru_cache(maxsize=64)(rule_for_sums)


def _in_one_reading(
    backend: Backend, arrays: Arrays, clipping: Clipping, names: Callable[[], Sequence[str]], mask: Any
) -> Summed | None:
    """Do it with one reading, where the backend can; those whose sums of squares cannot be trusted apart from others.

    So what an example adds does not depend on the others.
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
    apart = _in_two_readings(backend, arrays, clipping, names, others)
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


def _settled(
    backend: Backend, arrays: Arrays, clipping: Clipping, scope: Scope, mask: Any, holders: Holders
) -> tuple[Arrays, Norm]:
    """Return the arrays and their norm, under the policy "zero" those without what is not finite."""

    def measured() -> Norm:
        if scope.whole:
            return holders.measure(backend, arrays, clipping.order)
        norm = measure(backend, arrays, clipping.order, scope)
        return norm if mask is None else replace(norm, value=backend.xp.where(mask, norm.value, 0.0))

    norm = measured()
    if clipping.nonfinite.zeroes and not (backend.concrete and backend.xp.all(backend.xp.isfinite(norm.value))):
        arrays = backend.without_nonfinite(arrays)
        norm = measured()
    return arrays, norm


def _chosen(
    backend: Backend, arrays: Arrays, clipping: Clipping, norm: Norm, threshold: Any, holders: Holders
) -> Coefficient:
    # Processes that share a norm must come to the same coefficient, whatever they hold of it.
    split = holders.unseen_dtypes or needs_split(backend, arrays)
    chosen = coefficient(backend, norm, threshold, clipping.target, split=split)
    at_most = holders.exact_check(backend) if clipping.target.keeps else None
    if at_most is None or chosen.keep.ndim or not undecided(norm, threshold):
        return chosen
    fits = at_most(arrays, clipping.order.p, float(threshold))
    return replace(chosen, keep=backend.xp.asarray(fits))

"""What the kernels return, computed in XLA's operations: for programs that are exported, or compiled for other devices.

The error is at most that of the kernels (`sums.kernels_sum_error`), so the coefficients that follow from it hold here
too. The first reduction adds 32 terms, and the rest halves the number of terms with each addition: 2**40 terms go
through 66 additions each, fewer than the kernels' 87, and through no more than there are terms.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from gradclip._src.backends.jax.operations import FLUSHED, as_integers, as_rows, both_kinds, either, sum_by_rows, sums
from gradclip._src.backends.sums import halving_sum, raised
from gradclip._src.core.formats import FLOAT64, format_of, is_complex
from gradclip._src.core.rules import Coefficient, Factors, Rule

_AT_A_TIME = 32


def power_sums(
    arrays: Sequence[jax.Array], rows: tuple[int, ...], p: float, enough: float, **threads: int
) -> tuple[jax.Array, jax.Array]:
    """Return the sum of (|x| / divisor)**p over all arrays, and the divisor, for each row of the leading axes `rows`.

    The divisor is 1 if the sum is then finite and above `enough`. Otherwise it is the largest magnitude.
    """
    kinds = [_kinds(as_rows(x, len(rows)), p) for x in arrays if x.size]
    plain = _total([_sum([raised(jnp, wide, p) for wide in of_array]) for of_array in kinds], rows)
    one = jnp.ones_like(plain)
    if enough < 0:
        return plain, one
    largest = _furthest(jnp.max, [wide for of_array in kinds for wide in of_array], rows)
    again = jnp.isfinite(largest) & ~(jnp.isfinite(plain) & (plain > enough))
    # The compiler reads a smaller number as zero, and multiplies by the inverse instead of dividing.
    divisor = jnp.where(again & (largest > FLOAT64.tiny), jnp.minimum(largest, 1.0 / FLOAT64.tiny), one)

    def divided() -> jax.Array:
        each = divisor[..., None]
        return _total([_sum([raised(jnp, wide / each, p) for wide in of_array]) for of_array in kinds], rows)

    return either(again, divided, lambda: plain), divisor


def extremes(arrays: Sequence[jax.Array], rows: tuple[int, ...], **threads: int) -> tuple[jax.Array, jax.Array]:
    """Return the largest magnitude (NaN if one is NaN) and the smallest (NaN if one is non-finite), for each row."""
    magnitudes = [_magnitudes(as_rows(x, len(rows))) for x in arrays if x.size]
    largest = _furthest(jnp.max, magnitudes, rows)
    return largest, jnp.where(jnp.isfinite(largest), _furthest(jnp.min, magnitudes, rows), jnp.nan)


def add_examples(arrays: Sequence[jax.Array], examples: tuple[int, ...], **threads: int) -> tuple[jax.Array, jax.Array]:
    """Return each example's sum of squares, and the weighted sums over the examples, all in one vector.

    The first arrays are the rule of the weights, and for each example 0, or NaN to leave it out.
    """
    weighing, included, *batch = arrays
    squares = power_sums(batch, examples, p=2.0, enough=-1.0)[0] + included
    finite = jnp.isfinite(squares)
    by = Factors(Rule(*weighing).weights(jnp, jnp.sqrt(squares)))
    coefficient = Coefficient(keep=jnp.zeros_like(finite), blank=~finite, wide=by, narrow=by)
    sums = [[sum_by_rows(part, coefficient, _widened).reshape(-1) for part in _parts(x)] for x in batch]
    return squares, jnp.concatenate([jnp.stack(of_array, -1).reshape(-1) for of_array in sums])


def entries(vectors: Sequence[jax.Array], rows: tuple[int, ...]) -> list[jax.Array]:
    """Return each entry of each vector, in order; the leading axes are rows."""
    return [vector[..., index] for vector in vectors for index in range(vector.shape[-1])]


def _magnitudes(x: jax.Array) -> jax.Array:
    parts = [_widened(part) for part in _parts(x)]
    return jnp.abs(parts[0]) if len(parts) == 1 else jnp.hypot(*parts)


def _kinds(x: jax.Array, p: float) -> list[jax.Array]:
    """Return float64 arrays whose sums of |wide|**p add up to that of |x|**p."""
    if is_complex(x) and p != 2:
        return [_magnitudes(x)]
    return [
        wide for part in _parts(x) for wide in (both_kinds(part) if format_of(part) in FLUSHED else [_widened(part)])
    ]


def _parts(x: jax.Array) -> list[jax.Array]:
    return [x.real, x.imag] if is_complex(x) else [x]


def _widened(x: jax.Array) -> jax.Array:
    return as_integers(x) if format_of(x) in FLUSHED else x.astype(jnp.float64)


def _sum(terms: Sequence[jax.Array]) -> jax.Array:
    """Return the sum of arrays of one shape over their last axis."""
    *rows, count = terms[0].shape
    blocks = count // _AT_A_TIME
    rest = [x[..., blocks * _AT_A_TIME :] for x in terms]
    if blocks:
        shape = (*rows, blocks, _AT_A_TIME)
        found = sums([x[..., : blocks * _AT_A_TIME].reshape(shape) for x in terms], (len(rows) + 1,))
        rest = [jnp.concatenate(pair, -1) for pair in zip(found, rest, strict=True)]
    return sum(halving_sum(jnp, x, (len(rows),)) for x in rest)


def _total(terms: Sequence[jax.Array], rows: tuple[int, ...]) -> jax.Array:
    return halving_sum(jnp, jnp.stack([jnp.broadcast_to(term, rows) for term in terms]), (0,))


def _furthest(extreme: Callable[..., jax.Array], wides: Sequence[jax.Array], rows: tuple[int, ...]) -> jax.Array:
    """Return the largest or the smallest magnitude of each row."""
    each = [jnp.broadcast_to(extreme(jnp.abs(wide), -1), rows) for wide in wides]
    return extreme(jnp.stack(each), 0)

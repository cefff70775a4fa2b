"""Clip a client's update so that the bound holds for what the server computes from the parameters that are sent.

A client does not send its clipped update u but parameters s near old + u. The server computes s - old. If s is old + u
rounded to nearest, that difference may be longer than u: `gradclip` therefore rounds s toward old.

**Whether to clip.** Let x be the trained parameters, o those that the server sent, d the difference x - o, rounded to
nearest. A difference below the normal range is exact. So |x - o| <= |d| * (1 + 2 * r) in each element, for r the unit
roundoff, at most 2**-11. The computed norm of d has a relative error below 2**-19. So if it is below C * (1 - 2**-9),
both ||x - o|| and ||d|| are below C, and the client sends x as it is. If it is above C * (1 + 2**-9), the update is
clipped. In between, and for a C so small that float32 has few digits for it, U decides. U is x - o, rounded away from
zero, so |x - o| <= |U|. The client sends x if ||U|| <= C.

**A clipped update.** u is d clipped, ||u|| <= C, whatever the error of d. The client sends s, the float next to o + u
on the side of o. It lies between o and o + u, so |s - o| <= |u| exactly.

**What the server computes.** Rounding to nearest keeps order, and u is a float. So |s - o| <= |u| implies that the
computed difference is at most |u| too, in this format or a wider one. If x is sent, it is |d|, which is at most |U|, or
|x - o|. So the norm of the update, exact or computed element by element, is at most C in exact arithmetic.

**How the side is found.** The error e of d = fl(a + b) is computed exactly (Knuth's TwoSum): a + b = d + e. If e points
from d toward o, d is beyond o + u, and the float before it is not, as d is the nearest. Where an intermediate result
overflows, e is NaN: then s moves one step toward o and U one step away from zero, which is right whatever e is. To move
toward o, one is taken from the bits of s, read as a whole number, if u has the sign of s. Otherwise one is added. An s
of 0 is exact and stays.

Everything is NumPy, so it needs no other library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableSequence, Sequence
from typing import Any, NamedTuple

import numpy as np

from gradclip._src.flush_mode import with_subnormals
from gradclip._src.functional.clip import clip_by_global_norm, global_norm
from gradclip._src.functional.norm_at_most import norm_at_most
from gradclip._src.passed.arguments import check_threshold
from gradclip._src.public import public_in

Arrays = Sequence[Any]

_UNDECIDED = 2.0**-9
_FEW_DIGITS = 1e-30
_CHUNK = 1 << 15
"""Elements that are added at a time, few enough for all that is computed of them to stay in the cache."""


@public_in("integrations.flower")
class ClippedUpdate(NamedTuple):
    """What a client sends: its parameters, whether its update was clipped, and whether it was finite."""

    parameters: list[Any]
    clipped: bool
    finite: bool


@with_subnormals
def clipped_parameters(new: Arrays, old: Arrays, max_norm: float) -> ClippedUpdate:
    """Return `new`, moved toward `old` so that the norm of the update, new - old, is at most max_norm.

    Args:
        new: a client's trained parameters, NumPy arrays. Those of other floating dtypes than `old` are converted.
        old: the parameters it started from.
        max_norm: the threshold, in the units of the parameters.

    Arrays of integers and booleans, such as counters of batches, do not count and are sent as they are. An update with
    NaN or infinities, or beyond the range of its dtype, becomes zero: `old` is returned.

    Raises:
        ValueError: lists of different lengths, arrays of different shapes, floating-point numbers where integers were
            sent or the other way round, a threshold that is negative or NaN.
        TypeError: arrays of numbers that NumPy has no type for, such as bfloat16, or of objects.

    >>> new, old = [np.array([3.0, 4.0])], [np.zeros(2)]
    >>> clipped_parameters(new, old, max_norm=1.0).parameters[0].round(6).tolist()
    [0.6, 0.8]

    """
    max_norm = check_threshold(max_norm)
    pairs = _pairs(new, old)
    counted = [i for i, (x, o) in enumerate(pairs) if _is_floating(x, i) and _is_floating(o, i)]
    with np.errstate(all="ignore"):
        sent = [x.astype(o.dtype, copy=False) if i in counted else x for i, (x, o) in enumerate(pairs)]
        floats = [(sent[i], pairs[i][1]) for i in counted]
        updates = [np.asarray(x - o) for x, o in floats]
        shorter, norm = clip_by_global_norm(updates, max_norm, nonfinite="drop")
        if not (np.isfinite(norm) or all(np.isfinite(update).all() for update in updates)):
            return ClippedUpdate([o.copy() for _, o in pairs], clipped=False, finite=False)
        if _is_short(floats, float(norm), max_norm):
            return ClippedUpdate(sent, clipped=False, finite=True)
        for i, update in zip(counted, shorter, strict=True):
            sent[i] = _each_part(_sum, pairs[i][1], np.asarray(update))
    return ClippedUpdate(sent, clipped=True, finite=True)


def _is_short(pairs: Sequence[tuple[np.ndarray, np.ndarray]], norm: float, max_norm: float) -> bool:
    """Return whether new - old has a norm of at most max_norm, given the norm as it was computed."""
    if max_norm > _FEW_DIGITS and math.isfinite(norm) and abs(norm - max_norm) > _UNDECIDED * max_norm:
        return norm < max_norm
    return bool(norm_at_most([_each_part(_difference, x, o) for x, o in pairs], max_norm))


@public_in("integrations.flower")
def get_norm(input_arrays: Arrays) -> float:
    """Return the L2 norm of all floating-point arrays together.

    >>> get_norm([np.array([3.0]), np.array(4.0), np.array(7)])
    5.0
    """
    return float(global_norm(_floats(input_arrays)))


@public_in("integrations.flower")
def clip_inputs_inplace(input_arrays: MutableSequence[Any], clipping_norm: float) -> None:
    """Clip a model update in place to a norm of at most `clipping_norm`. One that is not finite becomes zero."""
    adaptive_clip_inputs_inplace(input_arrays, clipping_norm)


@public_in("integrations.flower")
def adaptive_clip_inputs_inplace(input_arrays: MutableSequence[Any], clipping_norm: float) -> bool:
    """Clip a model update in place, and return whether it was longer than `clipping_norm`.

    >>> update = [np.array([3.0]), np.array(4.0)]
    >>> longer = adaptive_clip_inputs_inplace(update, 1.0)
    >>> longer, [x.round(6).tolist() for x in update]
    (True, [[0.6], 0.8])
    """
    floats = _floats(input_arrays)
    clipping_norm = check_threshold(clipping_norm, "clipping_norm")
    finite = all(np.isfinite(x).all() for x in floats)
    if finite and norm_at_most(floats, clipping_norm):
        return False
    clipped = iter(clip_by_global_norm(floats, clipping_norm, nonfinite="drop")[0])
    for i, array in enumerate(input_arrays):
        if not _is_floating(np.asarray(array), i):
            continue
        if isinstance(array, np.ndarray):
            array[...] = next(clipped)
        else:  # a scalar, as NumPy returns for 0-d arrays, cannot change
            input_arrays[i] = next(clipped)
    return finite


@public_in("integrations.flower")
def compute_clip_model_update(param1: MutableSequence[Any], param2: Arrays, clipping_norm: float) -> None:
    """Clip the update param1 - param2 and write the parameters after it to the list `param1`."""
    compute_adaptive_clip_model_update(param1, param2, clipping_norm)


@public_in("integrations.flower")
def compute_adaptive_clip_model_update(param1: MutableSequence[Any], param2: Arrays, clipping_norm: float) -> bool:
    """Clip the update param1 - param2, write the parameters after it to `param1`, and return whether it was clipped.

    >>> new = [np.array([3.0, 4.0], np.float32), np.array(12.0, np.float32)]
    >>> old = [np.zeros(2, np.float32), np.float32(0)]
    >>> compute_adaptive_clip_model_update(new, old, 6.5)
    True
    >>> [x.round(4).tolist() for x in new]
    [[1.5, 2.0], 6.0]
    """
    made = clipped_parameters(param1, param2, check_threshold(clipping_norm, "clipping_norm"))
    param1[:] = made.parameters
    return made.clipped


def _pairs(new: Arrays, old: Arrays) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the arrays in pairs. Raise a ValueError if they are not parameters of one model."""
    what = "the trained parameters must have the shapes of those that were sent, but"
    if len(new) != len(old):
        raise ValueError(f"{what} there are {len(new)} and {len(old)} arrays.")
    found = list(zip(map(np.asarray, new), map(np.asarray, old), strict=True))
    for i, (x, o) in enumerate(found):
        if x.shape != o.shape:
            raise ValueError(f"{what} array {i} has shape {x.shape}, and {o.shape} was sent.")
        if _is_floating(x, i) and (not _is_floating(o, i) or (x.dtype.kind == "c" and o.dtype.kind == "f")):
            raise ValueError(
                f"array {i} was sent in {o.dtype} and comes back in {x.dtype}, which its dtype cannot hold. Convert it "
                f"to {o.dtype}, or send it in {x.dtype}."
            )
        if _is_floating(o, i) and not _is_floating(x, i):
            raise ValueError(
                f"array {i} was sent in {o.dtype} and comes back in {x.dtype}, which is not clipped. Convert it to "
                f"{o.dtype}, so that it is clipped. If it is a counter, send back the array that came."
            )
    return found


def _is_floating(array: np.ndarray, i: int) -> bool:
    """Say whether an array counts. Raise a TypeError for one that holds neither floating-point numbers nor integers."""
    if array.dtype.kind not in "fcbiu":
        raise TypeError(f"array {i} has dtype {array.dtype}, which cannot be clipped. Convert it, such as to float32.")
    return array.dtype.kind in "fc"


def _floats(arrays: Arrays) -> list[np.ndarray]:
    return [x for i, x in enumerate(map(np.asarray, arrays)) if _is_floating(x, i)]


def _each_part(function: Callable[[Any, Any], Any], a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Apply a function to real arrays, or to the real and the imaginary parts of complex ones."""
    if a.dtype.kind != "c":
        return np.asarray(function(a, b))
    made = np.empty_like(a)
    made.real, made.imag = function(a.real, b.real), function(a.imag, b.imag)
    return made


def _difference(new: np.ndarray, old: np.ndarray) -> np.ndarray:
    """Return new - old, rounded away from zero."""
    nearest, error = _with_error(new, -old)
    shorter = ~(error * np.sign(nearest) <= 0)
    return np.where(shorter, np.nextafter(nearest, np.copysign(np.inf, nearest)), nearest).astype(new.dtype)


def _sum(old: np.ndarray, update: np.ndarray) -> np.ndarray:
    """Return old + update, rounded toward old."""
    flat, added = old.reshape(-1), update.reshape(-1)
    made = np.empty(flat.shape, old.dtype)
    for start in range(0, flat.size, _CHUNK):
        part = slice(start, start + _CHUNK)
        made[part] = _sum_of_chunk(flat[part], added[part])
    return made.reshape(old.shape)


def _sum_of_chunk(old: np.ndarray, update: np.ndarray) -> np.ndarray:
    nearest, error = _with_error(old, update)
    bits, side, of_error = (x.view(f"i{nearest.itemsize}") for x in (nearest, update, error))
    beyond = (error != 0) & (((of_error ^ side) < 0) | np.isnan(error))
    bits -= beyond * (((bits ^ side) >> (8 * nearest.itemsize - 1)) | 1)  # 1 for equal signs, else -1
    return np.where(update == 0, old, nearest)


def _with_error(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a + b rounded to nearest, and the exact error (Knuth's TwoSum)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)

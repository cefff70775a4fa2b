"""Kernels for GPUs, written in Triton: `sums`, `decide`, `scale`, one launch each for all tensors of a device.

Tensors of float32, bfloat16 and float16 may be mixed. They are cut into chunks. A row of the table `chunks` says where
a chunk lies: the number of its tensor, its offset in bytes, its number of elements, and its dtype (0, 1, 2). A norm
belongs to a part, which is a run of chunks. `sums` reads each element once. `scale` looks at the coefficient first:
where it is 1 the program returns, and nothing is read or written.

The bound, as in `core.coefficient`:

1. The norm. A float32 number or narrower is exact in float64, and so is its square, which neither overflows nor
   underflows there. So a fused multiply-add and a multiplication followed by an addition give the same sum. All terms
   are at least 0. Whatever the order, a term goes through at most `additions(chunks)` additions, which bounds the
   relative error. Magnitudes for `inf` are compared as integers, which is exact, and NaN compares above infinity.
2. The coefficient. `decide` computes upper, keeps elements if upper <= max_norm, and otherwise lowers the quotient,
   with the constants of `core.coefficient`. Division, square root and products in float64 are rounded to nearest, since
   no product here is followed by an addition that could be fused. A quotient below float32's normal range becomes two
   factors, of which the first may be rounded to 1.
3. The products are those of the host's kernels, bit for bit: rounded to nearest in float32, below the normal range
   moved one step toward zero, then rounded toward zero in the dtype of the tensor. A GPU must not flush subnormal
   numbers for that: none of the instructions has the suffix `.ftz`, which a test checks. If a GPU read subnormal
   elements as zero, or wrote zeros for subnormal products, the result would only be smaller.

The second factor also says what else may happen: elements stay where it is 0, and become zeros where it is -1. A norm
that is not finite has the first factor NaN, or with `skip` the second factor -1. With `zero`, elements that are not
finite count as zeros, and become zeros also where all others are kept.

Factors of `core.one_factor` are lowered for products rounded to nearest. With these, `scale` rounds to nearest
(`rounding` 1), or all but float16 to nearest, where that would be stepped (2).
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = 1 << 16
"""The most elements of a chunk: a multiple of 8, so that chunks of aligned tensors are aligned."""
BLOCK = 4096
"""How many elements a program reads at a time."""
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}
"""How the kernels are compiled."""


def additions(chunks: int) -> int:
    """Return how many additions a term goes through at most, in a norm of so many chunks."""
    return 2 * (CHUNK // BLOCK + 2) + BLOCK + -(-chunks // BLOCK) + 2 + BLOCK


@triton.jit
def _start(address: tl.tensor, dtype: tl.constexpr, aligned: tl.constexpr) -> tl.tensor:
    if dtype == tl.bfloat16:  # the upper half of a float32 number, taken as an integer
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(dtype))
    if aligned:  # said of the pointer, not of the address: only then 16 bytes are loaded at once
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _loaded(places: tl.tensor, inside: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return elements as float32 numbers, 0 for those outside."""
    if dtype == tl.bfloat16:
        return (tl.load(places, mask=inside, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(places, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _aligned_count(address: tl.tensor, other: tl.tensor, count: tl.tensor) -> tl.tensor:
    """Return how many elements can be read 16 bytes at a time."""
    together = ((address | other) % 16) == 0
    return tl.multiple_of(tl.where(together, count // 8 * 8, 0).to(tl.int32), 8)


@triton.jit
def _added(
    total: tl.tensor,
    found: tl.tensor,
    address: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    order: tl.constexpr,
    zero: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    """Add the powers of elements to a total, or find the bits of their largest magnitude."""
    pointer = _start(address, dtype, aligned)
    for start in range(begin, end, block):
        at = start + tl.arange(0, block)
        x = _loaded(pointer + at, at < end, dtype)
        bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if zero:
            infinite = bits >= 0x7F800000
            found = found | infinite.to(tl.int32)
            x = tl.where(infinite, 0.0, x)
            bits = tl.where(infinite, 0, bits)
        if order == 0:
            total = tl.maximum(total, bits)
        elif order == 1:
            total += tl.abs(x).to(tl.float64)
        else:
            wide = x.to(tl.float64)
            total += wide * wide
    return total, found


@triton.jit
def _added_all(
    total: tl.tensor,
    found: tl.tensor,
    address: tl.tensor,
    count: tl.tensor,
    dtype: tl.constexpr,
    order: tl.constexpr,
    zero: tl.constexpr,
    block: tl.constexpr,
) -> tl.tensor:
    body = _aligned_count(address, address, count)
    total, found = _added(total, found, address, 0, body, dtype, True, order, zero, block)
    return _added(total, found, address, body, count, dtype, False, order, zero, block)


@triton.jit
def sums(
    chunks: tl.tensor,
    addresses: tl.tensor,
    partial: tl.tensor,
    flags: tl.tensor,
    order: tl.constexpr,
    zero: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write the sum of powers of each chunk; for `order` 0 its largest magnitude; and whether it set any to zero."""
    row = tl.program_id(0)
    chunk = chunks + row.to(tl.int64) * 4
    address = tl.load(addresses + tl.load(chunk)) + tl.load(chunk + 1)
    count, kind = tl.load(chunk + 2).to(tl.int32), tl.load(chunk + 3)
    if order == 0:
        total = tl.zeros((block,), tl.int32)
    else:
        total = tl.zeros((block,), tl.float64)
    found = tl.zeros((block,), tl.int32)
    if kind == 0:
        total, found = _added_all(total, found, address, count, tl.float32, order, zero, block)
    elif kind == 1:
        total, found = _added_all(total, found, address, count, tl.bfloat16, order, zero, block)
    else:
        total, found = _added_all(total, found, address, count, tl.float16, order, zero, block)
    if order == 0:
        tl.store(partial + row, tl.max(total, 0).to(tl.float32, bitcast=True).to(tl.float64))
    else:
        tl.store(partial + row, tl.sum(total, 0))
    if zero:
        tl.store(flags + row, tl.max(found, 0))


@triton.jit
def _norm(partial: tl.tensor, begin: tl.tensor, end: tl.tensor, order: tl.constexpr, block: tl.constexpr) -> tl.tensor:
    """Return the norm of chunks."""
    total = tl.zeros((block,), tl.float64)
    for start in range(begin, end, block):
        at = start + tl.arange(0, block)
        some = tl.load(partial + at, mask=at < end, other=0.0)
        if order == 0:  # no number is negative, so their bits are in the same order, and NaN is the largest
            bits = tl.maximum(total.to(tl.int64, bitcast=True), some.to(tl.int64, bitcast=True))
            total = bits.to(tl.float64, bitcast=True)
        else:
            total += some
    if order == 0:
        norm = tl.max(total.to(tl.int64, bitcast=True), 0).to(tl.float64, bitcast=True)
    else:
        norm = tl.sum(total, 0)
    if order == 2:
        norm = tl.sqrt(norm)
    return norm


@triton.jit(do_not_specialize=["parts"])
def decide(
    partial: tl.tensor,
    starts: tl.tensor,
    norms: tl.tensor,
    factors: tl.tensor,
    limits: tl.tensor,
    shown: tl.tensor,
    max_norm: tl.float64,
    inflate: tl.float64,
    times: tl.float64,
    parts: tl.tensor,
    order: tl.constexpr,
    step: tl.constexpr,
    show: tl.constexpr,
    joint: tl.constexpr,
    skip: tl.constexpr,
    lowered: tl.constexpr,
    narrow_lowered: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write the norm and the two factors of each part.

    The threshold is `max_norm`, or with a `step` read from `limits`: 1 for one of each part, 0 for the same for all.
    With `joint`, a part that is not finite counts for all, and the norm of all parts is written after theirs. If asked
    to `show` it, say whether the norm is finite, above the threshold, and above so many `times` the threshold; a norm
    that float32 can hold is compared as float32.
    """
    part = tl.program_id(0)
    norm = _norm(partial, tl.load(starts + part), tl.load(starts + part + 1), order, block)
    tl.store(norms + part, norm.to(norms.dtype.element_ty))
    every = norm
    if joint:
        every = _norm(partial, 0, tl.load(starts + parts), order, block)
        if part == 0:
            tl.store(norms + parts, every.to(norms.dtype.element_ty))
    limit = tl.full((), 0.0, tl.float64) + max_norm  # the interpreter passes a plain number
    if step >= 0:
        limit = tl.load(limits + part * step).to(tl.float64)
        limit = tl.where(limit < 0.0, 0.0, limit)
    finite = every < float("inf")
    if show:
        told = norm.to(tl.float32).to(tl.float64)
        told = tl.where(told < float("inf"), told, norm)
        tl.store(shown, finite.to(tl.int8))
        tl.store(shown + 1, (finite & (told > limit)).to(tl.int8))
        tl.store(shown + 2, (finite & (told > limit * times)).to(tl.int8))
    upper = norm * inflate
    keep = finite & (upper <= limit)
    above = tl.where(upper < float("inf"), tl.where(upper == 0.0, 1.0, upper), 1.0)
    narrow = limit / above * lowered * narrow_lowered
    tiny = narrow < 1.1754943508222875e-38
    first = tl.where(tiny, narrow * 8.507059173023462e37 * 0.9999999403953552, narrow)
    first = tl.where(first < 1.1754943508222875e-38, 0.0, first)
    second = tl.where(keep, 0.0, tl.where(tiny, 1.1754943508222875e-38, 1.0))
    if skip:
        second = tl.where(finite, second, -1.0)
    else:
        first = tl.where(finite, first, float("nan"))
    tl.store(factors + 2 * part, first.to(tl.float32))
    tl.store(factors + 2 * part + 1, second.to(tl.float32))


@triton.jit
def _narrowed(y: tl.tensor, dtype: tl.constexpr, rounding: tl.constexpr) -> tl.tensor:
    """Return float32 numbers in a dtype."""
    if dtype == tl.bfloat16:
        bits = y.to(tl.int32, bitcast=True)
        if rounding != 0:  # half a step is added, less if the result would be even; not to NaN, which has all bits set
            bits = tl.where(y == y, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        return (bits >> 16).to(tl.int16)
    elif dtype == tl.float16:
        nearest = y.to(tl.float16)
        if rounding == 1:
            return nearest
        above = tl.abs(nearest.to(tl.float32)) > tl.abs(y)
        return (nearest.to(tl.int16, bitcast=True) - above.to(tl.int16)).to(tl.float16, bitcast=True)
    else:
        return y


@triton.jit
def _multiplied(
    source: tl.tensor,
    target: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    dtype: tl.constexpr,
    aligned: tl.constexpr,
    zero: tl.constexpr,
    rounding: tl.constexpr,
    block: tl.constexpr,
) -> None:
    reading, writing = _start(source, dtype, aligned), _start(target, dtype, aligned)
    for start in range(begin, end, block):
        at = start + tl.arange(0, block)
        x = _loaded(reading + at, at < end, dtype)
        if zero:
            x = tl.where((x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000, 0.0, x)
        y = x * first * second
        if rounding == 0:
            below_normal = (tl.abs(y) < 1.1754943508222875e-38) & (y != 0.0)
            y = (y.to(tl.int32, bitcast=True) - below_normal.to(tl.int32)).to(tl.float32, bitcast=True)
        y = tl.where(second == 0.0, x, y)
        y = tl.where(second < 0.0, 0.0, y)
        tl.store(writing + at, _narrowed(y, dtype, rounding), mask=at < end)


@triton.jit
def _multiplied_all(
    source: tl.tensor,
    target: tl.tensor,
    count: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    dtype: tl.constexpr,
    zero: tl.constexpr,
    rounding: tl.constexpr,
    block: tl.constexpr,
) -> None:
    body = _aligned_count(source, target, count)
    _multiplied(source, target, 0, body, first, second, dtype, True, zero, rounding, block)
    _multiplied(source, target, body, count, first, second, dtype, False, zero, rounding, block)


@triton.jit(do_not_specialize=["rows"])
def scale(
    chunks: tl.tensor,
    part_of: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    factors: tl.tensor,
    flags: tl.tensor,
    rows: tl.tensor,
    step: tl.constexpr,
    in_place: tl.constexpr,
    zero: tl.constexpr,
    rounding: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Write the elements of each chunk times the factors of its part; nothing in place if all of them stay.

    With a `step` of 0 all parts have the same factors, else 2.
    """
    row = rows - 1 - tl.program_id(0)  # the chunks read last may still lie in the cache
    part = tl.load(part_of + row)
    first, second = tl.load(factors + step * part), tl.load(factors + step * part + 1)
    asked = second != 0.0
    if zero:
        asked = asked | (tl.load(flags + row) != 0)
    if not in_place:
        asked = asked | (row >= 0)  # always, as a value that is computed
    if asked:
        chunk = chunks + row.to(tl.int64) * 4
        number, offset = tl.load(chunk), tl.load(chunk + 1)
        count, kind = tl.load(chunk + 2).to(tl.int32), tl.load(chunk + 3)
        source, target = tl.load(sources + number) + offset, tl.load(targets + number) + offset
        if kind == 0:
            _multiplied_all(source, target, count, first, second, tl.float32, zero, rounding, block)
        elif kind == 1:
            _multiplied_all(source, target, count, first, second, tl.bfloat16, zero, rounding, block)
        else:
            _multiplied_all(source, target, count, first, second, tl.float16, zero, rounding, block)

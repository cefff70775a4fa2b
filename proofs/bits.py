"""Steps on bits, which are right for all numbers: z3 finds none for which they are not.

The models follow `native/formats.hpp` line by line. Its constants are read from it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from claim import Claim, Loosened
from solver import impossible

from gradclip._src import native
from gradclip._src.core.formats import FLOAT16, FLOAT32, Format, low_bits_mask

_NATIVE = "gradclip._src.native"
_SOURCE = (Path(native.__file__).parent / "formats.hpp").read_text()


def _found(pattern: str) -> list[int]:
    """Return the whole numbers in the only place of the source that a pattern describes."""
    (match,) = re.finditer(pattern, _SOURCE)
    return [int(number, 0) for number in match.groups()]


def _power(text: str) -> int:
    """Return the bits of the float32 number 2**n that multiplies in the only place of the source that ends so."""
    (exponent,) = _found(text.replace("N", r"0x1p(\d+)f"))
    return (exponent + 127) << 23


FLOAT32_ADDED, FLOAT32_FOUND = _found(r"\(magnitude \+ (0x\w+)u\) >= (0x\w+);")
HALF_ADDED, HALF_FOUND = _found(r"& 0x7fff\) \+ (0x\w+)\);[^$]*?any\(\(Vector<int32_t>\)\(largest > (0x\w+)\)\)")
(HALF_KEPT,) = _found(r"y\.v\[kPairs \+ i\] & (0x\w+)\)")
(FLOAT16_BELOW,) = _found(r"below_normal = magnitude < (0x\w+);")
FLOAT16_CUT, FLOAT16_BIAS = _found(r"cut = \(magnitude >> (\d+)\) - \((\d+) << 10\);")
(FLOAT16_QUIET,) = _found(r"\(magnitude > 0x7f800000\) & \((0x\w+) \|")
WIDENED_SHIFT = _found(r"\(magnitude << (\d+)\) \* 0x1p112f")[0]
EXACT_UP_TO = 2.0**-13
"""Below it a step of float16 is exact."""
STEPS, WIDENED = _power(r"\(magnitude & below_normal\) \* N"), _power(r"\(magnitude << 13\) \* N")


def _word(value: int, width: int = 32) -> str:
    """Return the bits of a whole number."""
    return f"#x{value & ((1 << width) - 1):0{width // 4}x}"


def _float(bits: str, exponent: int = 8, precision: int = 24) -> str:
    return f"((_ to_fp {exponent} {precision}) {bits})"


def _given(exponent: int = 8, precision: int = 24) -> str:
    """Declare the bits b of a number y, and those of its magnitude."""
    width = exponent + precision
    return f"""(set-logic QF_FPBV)
(declare-const b (_ BitVec {width}))
(define-fun y () (_ FloatingPoint {exponent} {precision}) {_float("b", exponent, precision)})
(define-fun magnitude () (_ BitVec {width}) (bvand b {_word((1 << width - 1) - 1, width)}))
"""


def _not_above(exponent: int, precision: int) -> str:
    """Say that a number below the normal range is not one step nearer to zero, or that another one is changed."""
    width = exponent + precision
    least = _float(_word(1 << precision - 1, width), exponent, precision)
    step = _float(_word(1, width), exponent, precision)
    return f"""{_given(exponent, precision)}
(define-fun below () Bool (and (fp.lt y {least}) (fp.gt y (fp.neg {least})) (not (fp.isZero y))))
(define-fun moved () (_ BitVec {width}) (bvadd b (ite below {_word(-1, width)} {_word(0, width)})))
(define-fun m () (_ FloatingPoint {exponent} {precision}) {_float("moved", exponent, precision)})
(assert (not (and
  (= ((_ extract {width - 1} {width - 1}) moved) ((_ extract {width - 1} {width - 1}) b))
  (=> (fp.isSubnormal y) (and (fp.eq (fp.abs m) (fp.sub RTP (fp.abs y) {step}))
                              (fp.eq (fp.abs m) (fp.sub RTN (fp.abs y) {step}))))
  (=> (not (fp.isSubnormal y)) (= moved b)))))"""


def _float32_test(wrong: str) -> str:
    return f"""{_given()}
(define-fun hit () Bool (bvsge (bvadd magnitude {_word(FLOAT32_ADDED)}) {_word(FLOAT32_FOUND)}))
(assert {wrong})"""


def _half_test(wrong: str) -> str:
    return f"""{_given()}
(define-fun h () (_ BitVec 16) (bvand ((_ extract 31 16) b) #x7fff))
(define-fun hit () Bool (bvsgt (bvadd h {_word(HALF_ADDED, 16)}) {_word(HALF_FOUND, 16)}))
(assert {wrong})"""


def _half_cut(wrong: str) -> str:
    return f"""{_given()}
(define-fun c () Float32 {_float(f"(bvand b {_word(HALF_KEPT)})")})
(assert {wrong})"""


def _narrowed(wrong: str) -> str:
    """Follow `Float16::narrowed` for processors without F16C."""
    return f"""{_given()}
(define-fun below () Bool (bvslt magnitude {_word(FLOAT16_BELOW)}))
(define-fun scaled () Float32 (fp.mul RNE {_float(f"(ite below magnitude {_word(0)})")} {_float(_word(STEPS))}))
(define-fun steps () (_ BitVec 32) ((_ fp.to_sbv 32) RTZ scaled))
(define-fun shifted () (_ BitVec 32) (bvlshr magnitude {_word(FLOAT16_CUT)}))
(define-fun cut () (_ BitVec 32) (bvsub shifted {_word(FLOAT16_BIAS << 10)}))
(define-fun nan () (_ BitVec 32) (ite (bvsgt magnitude #x7f800000)
  (bvor {_word(FLOAT16_QUIET)} (bvand shifted #x000003ff)) #x00000000))
(define-fun result () (_ BitVec 32) (bvor
  (ite (bvslt magnitude #x7f800000) (ite below steps cut) (bvor #x00007c00 nan))
  (bvand (bvlshr b #x00000010) #x00008000)))
(define-fun out () Float16 {_float("((_ extract 15 0) result)", 5, 11)})
(define-fun in_range () Bool (bvslt magnitude #x47800000))
(assert {wrong})"""


def _widened() -> str:
    return f"""(set-logic QF_FPBV)
(declare-const h (_ BitVec 16))
(declare-const product (_ BitVec 32))
(define-fun x () (_ BitVec 32) ((_ zero_extend 16) h))
(define-fun magnitude () (_ BitVec 32) (bvand x #x00007fff))
(define-fun shifted () Float32 {_float(f"(bvshl magnitude {_word(WIDENED_SHIFT)})")})
(assert (= {_float("product")} (fp.mul RNE shifted {_float(_word(WIDENED))})))
(define-fun special () (_ BitVec 32) (ite (bvsge magnitude #x00007c00) #x7f800000 #x00000000))
(define-fun result () (_ BitVec 32) (bvor product (bvor special (bvshl (bvand x #x00008000) #x00000010))))
(assert (not (= {_float("result")} {_float("RNE " + _float("h", 5, 11))})))"""


def _stepped() -> str:
    """Follow the step of `core.one_factor` in float16, rounded to nearest."""
    step = _float(f"RNE {FLOAT16.step:.30f}", 5, 11)
    up_to = _float(f"RNE {EXACT_UP_TO:.20f}", 5, 11)
    return f"""{_given(5, 11)}
(define-fun s () Float16 {step})
(define-fun r () Float16 (fp.sub RNE y (fp.max (fp.min y s) (fp.neg s))))
(define-fun less () Float16 {_float("(bvsub magnitude #x0001)", 5, 11)})
(assert (and (not (fp.isNaN y)) (not (fp.isInfinite y)) (or
  (not (fp.leq (fp.abs r) (fp.abs y)))
  (and (fp.leq (fp.abs y) {up_to}) (fp.geq (fp.abs y) s) (not (fp.eq (fp.abs r) less))))))"""


def _masked() -> str:
    """Follow `portable.narrow` for a number in float16's normal range."""
    mask = _word(low_bits_mask(FLOAT32, FLOAT16))
    return f"""{_given()}
(define-fun c () Float32 {_float(f"(bvand b {mask})")})
(define-fun least () Float32 {_float(f"RNE {FLOAT16.tiny:.20f}")})
(assert (and (fp.leq least (fp.abs y)) (bvslt magnitude #x47800000)
  (not (fp.eq {_float("RNE c", 5, 11)} {_float("RTZ y", 5, 11)}))))"""


_TOWARD_ZERO = f"(not (fp.eq out {_float('RTZ y', 5, 11)}))"
_Text = Callable[[], str]


def _of_kernels() -> Iterator[tuple[str, _Text, tuple[Loosened, ...]]]:
    """Yield names, what z3 must find impossible, and constants with which it is possible."""
    yield "float32 below the normal range goes one step toward zero", partial(_not_above, 8, 24), ()
    yield "float64 below the normal range goes one step toward zero", partial(_not_above, 11, 53), ()
    off = (Loosened("bits.FLOAT32_ADDED", FLOAT32_ADDED - 1),)
    yield "the test of float32 misses no number", partial(_float32_test, "(and (fp.isSubnormal y) (not hit))"), off
    alone = "(and hit (not (fp.isSubnormal y)) (not (= magnitude #x00800000)))"
    more = (Loosened("bits.FLOAT32_ADDED", FLOAT32_ADDED + 1),)
    yield "the test of float32 finds one more, the smallest normal number", partial(_float32_test, alone), more
    missed = "(and (fp.isSubnormal y) (not (= h #x0000)) (not hit))"
    yield (
        "the test of bfloat16 misses no number",
        partial(_half_test, missed),
        (Loosened("bits.HALF_FOUND", HALF_FOUND + 1),),
    )
    more = (Loosened("bits.HALF_FOUND", HALF_FOUND - 1),)
    yield "the test of bfloat16 finds no other", partial(_half_test, "(and hit (not (fp.isSubnormal y)))"), more
    kept = (Loosened("bits.HALF_KEPT", 0xFFFF8000),)
    cut = f"(and (not (fp.isNaN y)) (not (fp.eq c {_float('RNE ' + _float('RTZ y', 8, 8))})))"
    yield "bfloat16 is float32 cut toward zero", partial(_half_cut, cut), kept
    quiet = "(and (fp.isNaN y) (= ((_ extract 22 22) b) #b1) (not (fp.isNaN c)))"
    yield "a quiet NaN stays one in bfloat16", partial(_half_cut, quiet), (Loosened("bits.HALF_KEPT", 0xFF800000),)
    small = (Loosened("bits.STEPS", STEPS + 1),)
    yield "float16 below its normal range is cut toward zero", partial(_narrowed, f"(and below {_TOWARD_ZERO})"), small
    normal = f"(and (not below) in_range {_TOWARD_ZERO})"
    yield (
        "float16 is cut toward zero",
        partial(_narrowed, normal),
        (Loosened("bits.FLOAT16_BELOW", FLOAT16_BELOW - 2**23),),
    )
    nan = "(and (fp.isNaN y) (not (fp.isNaN out)))"
    yield "NaN stays one in float16", partial(_narrowed, nan), (Loosened("bits.FLOAT16_QUIET", 0),)
    sign = "(and (not (fp.isNaN y)) (or (fp.isInfinite y) in_range) (not (= (fp.isNegative out) (fp.isNegative y))))"
    yield "float16 keeps the sign", partial(_narrowed, sign), (Loosened("bits.FLOAT16_BIAS", FLOAT16_BIAS + 32),)
    yield "float16 is widened exactly", _widened, (Loosened("bits.WIDENED", WIDENED + 1),)


_MASK = low_bits_mask


def _one_bit_more(source: Format, target: Format) -> int:
    return ~(~_MASK(source, target) >> 1)


def _checked(text: _Text) -> str:
    impossible(text())
    return "all numbers"


def claims() -> list[Claim]:
    """Return what is claimed of bits."""
    kernels = [Claim(name, _NATIVE, "bits.py", partial(_checked, text), some) for name, text, some in _of_kernels()]
    more, longer = Loosened("bits.low_bits_mask", _one_bit_more), Loosened("bits.EXACT_UP_TO", 2.0**-12)
    cut, step = "clearing bits of float32 cuts toward zero", "a step of float16 is exact and makes no number larger"
    portable, one_factor = "gradclip._src.backends.portable", "gradclip._src.core.one_factor"
    return [
        *kernels,
        Claim(cut, portable, "bits.py", partial(_checked, _masked), (more,)),
        Claim(step, one_factor, "bits.py", partial(_checked, _stepped), (longer,)),
    ]

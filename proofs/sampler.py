"""Rejection by a probability in floating point: how far the computed one is from the exact one.

The operations are those of `_decided` in `private/noise/discrete.py` and of the kernels in `native/sampler.hpp`,
written down here, with the constants of the former.
"""

import inspect
import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

from claim import Claim, Loosened, Refuted
from gappa import literal
from script import HUGE, Script, proven

from gradclip._src import native
from gradclip._src.private.noise import discrete

_MODULE = "gradclip._src.private.noise.discrete"
EXPONENT, EXP = Fraction(2) ** -42, Fraction(2) ** -32
"""The errors that the docstring states: of the exponent, absolute, and of the exponential of it, relative."""
_KERNELS = (Path(native.__file__).parent / "sampler.hpp").read_text()
DEGREE = max(int(order) for order in re.findall(r"taylor<(\d+)>", _KERNELS))
_LOG2 = (Fraction(6931471805599453, 10**16), Fraction(6931471805599454, 10**16))


def _check_exponent() -> str:
    """Prove the error of V log 2 - y**2 / (2 s**2) - A, where no part is above the farthest."""
    script = Script()
    script.lines += """v = int<ne>(v_); log = float64(L); S = float64(S_); u = int<zr>(u_); A = float64(A_);
uf = float64(u);
s = float64(uf + v * t);
away = float64(s / S);
h = float64(0.5 * away);
sq = float64(h * away);
m = float64(v * log);
d = float64(sq + A);
E = float64(m - d);
Y = u + v * t;
ya = Y / S;
r = h * away / (0.5 * (ya * ya));
G = v * L - 0.5 * (ya * ya) - A;""".splitlines()
    hints = """E - G -> (E - (m - d)) + (m - v * log) + v * (log - L) - (d - (sq + A)) - (sq - 0.5 * (ya * ya));
sq - 0.5 * (ya * ya) -> (0.5 * (ya * ya)) * (sq / (0.5 * (ya * ya)) - 1) { ya <> 0 };
sq / (0.5 * (ya * ya)) -> (1 + (sq - h * away) / (h * away)) * r { ya <> 0, h <> 0, away <> 0 };
r -> (1 + (h - 0.5 * away) / (0.5 * away)) * ((away / ya) * (away / ya)) { ya <> 0, away <> 0 };
away / ya -> (1 + (away - s / S) / (s / S)) * (s / Y) { ya <> 0, Y <> 0, s <> 0, S <> 0 };
s / Y -> (1 + (s - (uf + v * t)) / (uf + v * t)) * ((uf + v * t) / Y) { Y <> 0, uf + v * t <> 0 };
(uf + v * t) / Y -> 1 + (u / Y) * ((uf - u) / u) { Y <> 0, u <> 0 };""".splitlines()
    farthest, small = Fraction(discrete._FARTHEST), Fraction(2) ** -200
    ranges = [
        ("v", 0, discrete._LARGEST_V),
        ("t", 1, Fraction(2) ** 60),
        ("u", 1, Fraction(2) ** 60),
        ("Y", 1, Fraction(2) ** 62),
        ("S", 1, Fraction(2) ** 60),
        ("L", Fraction(11, 16), Fraction(45, 64)),
        ("A", 0, Fraction(1)),
        ("ya", small, Fraction(int(math.sqrt(2 * farthest)) + 1)),
        ("0.5 * (ya * ya)", small, farthest),
        ("away", small, 2 * farthest),
        ("s", small, HUGE),
        ("uf", small, HUGE),
        ("u / Y", 0, 1),
        ("h", small, HUGE),
        ("sq", small, HUGE),
    ]
    proven(script, ranges, f"E - G in [{literal(-EXPONENT)}, {literal(EXPONENT)}]", hints)
    return "2^-42"


def _check_exponent_of_kernels() -> str:
    """Prove the error of y**2 / (2 s**2) + A as the kernels compute it, with 51 bits of U."""
    script = Script()
    script.lines += """S = float64(S_); A = float64(A_);
I = float64(1 / S);
a = float64(W * I);
b = float64(B * I);
away = float64(a + b);
h = float64(0.5 * away);
sq = float64(h * away);
E = float64(sq + A);
Y = u + B;
ya = Y / S;
G = 0.5 * (ya * ya) + A;
near = 0.5 * (away - ya) * (away - ya + 2 * ya);""".splitlines()
    hints = """E - G -> (E - (sq + A)) + (sq - h * away) + (h - 0.5 * away) * away + near;
away - ya -> (away - (a + b)) + (a - W * I) + (b - B * I) + (W - u) * I + Y * (I - 1 / S) { S <> 0 };
Y * (I - 1 / S) -> ya * ((I - 1 / S) / (1 / S)) { S <> 0 };
(W - u) * I -> (W - u) / S * (1 + (I - 1 / S) / (1 / S)) { S <> 0 };
W * I -> W / S * (1 + (I - 1 / S) / (1 / S)) { S <> 0 };
B * I -> B / S * (1 + (I - 1 / S) / (1 / S)) { S <> 0 };""".splitlines()
    farthest = Fraction(discrete._FARTHEST)
    most = Fraction(math.isqrt(int(2 * farthest * 2**40)) + 1, 2**20)
    ranges = [
        ("S", 1, Fraction(2) ** 60),
        ("A", 0, 1),
        ("ya", 0, most),
        ("W / S", 0, most),
        ("B / S", 0, most),
        ("W", 0, Fraction(2) ** 60),
        ("B", 0, Fraction(2) ** 62),
        # U is below t, and t is at most 2 s log 2. At most 2**-51 of t is cut off.
        ("(W - u) / S", -Fraction(45, 32) / 2**51, 0),
        ("0.5 * (ya * ya)", 0, farthest),
    ]
    proven(script, ranges, f"E - G in [{literal(-EXPONENT)}, {literal(EXPONENT)}]", hints)
    return "2^-42"


def _check_margin() -> str:
    """Prove that the margin covers these errors, and those of the products that are compared."""
    script = Script()
    script.lines += ["q = float64(q_);", "k = 1 - M;", "K = 1 + M;", "low = float64(q * k);", "high = float64(q * K);"]
    # exp(x) - 1 is at most x + x**2 in magnitude, for x up to 1.
    error = (1 + EXPONENT + EXPONENT**2) * (1 + EXP) - 1
    ranges = [
        ("M", discrete._MARGIN, discrete._MARGIN),
        ("q", Fraction(2) ** -150, 2),
        ("q / p", 1 - error, 1 + error),
        ("p", Fraction(2) ** -151, 2),
    ]
    hints = [
        "low / p -> (1 + (low - q * k) / (q * k)) * (k * (q / p)) { p <> 0, q <> 0, k <> 0 };",
        "high / p -> (1 + (high - q * K) / (q * K)) * (K * (q / p)) { p <> 0, q <> 0, K <> 0 };",
    ]
    proven(script, ranges, "low / p <= 1 /\\ high / p >= 1", hints)
    return "2^-30, 2^-31.9 needed"


def _check_polynomial() -> str:
    """Check the remainder of Taylor's polynomial of the exponential, in fractions, and that margins are the same."""
    (margin,) = re.findall(r"kMargin = (\S+);", _KERNELS)
    if float.fromhex(margin) != discrete._MARGIN:
        raise Refuted(f"the kernels have the margin {margin}")
    largest = _LOG2[1] / 2 + Fraction(2) ** -46
    remainder = largest ** (DEGREE + 1) / math.factorial(DEGREE + 1) / (1 - largest / (DEGREE + 2))
    if remainder >= Fraction(2) ** -41:
        raise Refuted(f"the remainder is {float(remainder):g}")
    return f"2^{math.log2(remainder):.1f}"


def _check_operations() -> str:
    """Check that the two programs have the operations that are proven above, each once."""
    kernels, source = " ".join(_KERNELS.split()), " ".join(inspect.getsource(discrete._decided).split())
    wanted = {
        kernels: """u_unit_(std::ldexp(1 / target.scale, dropped_)),
v_unit_(std::ldexp(1 / target.scale, target.bits)),
away = as_double(u >> dropped_) * u_unit_ + as_double(v) * v_unit_;
exp_doubled(-at_most_farthest(0.5 * away * away + shift_), v);
low = std::bit_cast<double>(kOne | (second >> 12)) - 1.0;
below = is_negative(low + 0x1p-52 - p * (1 - kMargin)), within = is_negative(low - p * (1 + kMargin));
shifted = x * kLog2E + kToWhole;
rest = x - (shifted - kToWhole) * kLog2;""",
        source: """away = (u.astype(np.float64) + np.ldexp(v.astype(np.float64), target.bits)) / target.scale
p = np.exp(v * math.log(2) - np.minimum(0.5 * away * away + target.shift, _FARTHEST))
low = np.ldexp((second >> np.uint64(12)).astype(np.float64), -52)
below, above = low + 2.0**-52 <= p * (1 - _MARGIN), low >= p * (1 + _MARGIN)""",
    }
    for text, lines in wanted.items():
        for line in lines.splitlines():
            if text.count(line) != 1:
                raise Refuted(f"a sampler does not have: {line}")
    return f"{sum(len(lines.splitlines()) for lines in wanted.values())} same lines"


def claims() -> list[Claim]:
    """Return what is proven here."""

    def claim(name: str, check: Callable[[], str], *pair: Loosened) -> Claim:
        return Claim(name, _MODULE, "sampler.py", check, pair[:1], pair[1:])

    margin, farthest = f"{_MODULE}._MARGIN", f"{_MODULE}._FARTHEST"
    return [
        claim("the exponent of an acceptance", _check_exponent, Loosened(farthest, 2000.0)),
        claim("the same in the kernels", _check_exponent_of_kernels, Loosened(farthest, 2000.0)),
        claim(
            "the margin of a comparison", _check_margin, Loosened(margin, 2.0**-32), Loosened(margin, 1.1 * 2.0**-32)
        ),
        claim("the polynomial of the kernels", _check_polynomial, Loosened("sampler.DEGREE", 9)),
        claim(
            "the samplers' operations", _check_operations, Loosened("sampler._KERNELS", _KERNELS.replace("0.5 *", ""))
        ),
    ]

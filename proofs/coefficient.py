"""The coefficient, and the products with it: none is above the exact x * C / N.

The functions of `core/coefficient.py` and `backends/portable.py` run on symbols, so the operations below are theirs.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from claim import Claim, Loosened, Refuted
from gappa import literal
from script import HUGE, Range, Script, Splits, Target, around, never_above, operations, proven, split
from traced import Later, Namespace, Number, Way, given, now, rounded_to, ways

from gradclip._src.backends.portable import Portable
from gradclip._src.core import coefficient, rules
from gradclip._src.core.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Format
from gradclip._src.core.norms import Norm, settled

MODULE = "gradclip._src.core.coefficient"
PAD = 4
"""By how many units of roundoff errors of norms are overstated: step 1 of the proof."""
_ROUNDOFF = Fraction(FLOAT64.roundoff)
_INPUTS: list[Range] = [(name, Fraction(2) ** -1074, Fraction(2) ** 1024) for name in ("x", "C", "U")]
_LARGE, _ONE, _LITTLE = (
    float(settled(SimpleNamespace(xp=np, wide=FLOAT64), Norm(np.float64(1.0), np.float64(divisor), 0.0, 0.0)).divisor)
    for divisor in (2.0**400, 1.0, 2.0**-400)
)
"""The units of norms that were divided by their largest element, or by its share."""
# A norm in the large unit is above 2**-128 of it, and below the root of 2**60 times the range.
_IN_LARGE_UNITS = [*_INPUTS[:2], ("U", Fraction(2) ** -150, Fraction(2) ** 600)]


class Traced(Portable):
    """The operations of all frameworks, on symbols."""

    def __init__(self, wide: Format = FLOAT64) -> None:
        super().__init__(Namespace(), wide)

    @property
    def wide_dtype(self) -> Format:
        return self.wide

    def leave(self, array: object, leaf: object) -> object:
        return array

    def leave_sum(self, wide: object, x: object, dtype: object) -> object:
        return wide

    def narrow(self, x: Number, like: Number) -> Later:
        # Its steps on bits are proven in bits.py.
        return Later(lambda: rounded_to(now(x), like.format, cut=True) if like.format is not now(x).format else now(x))


def clipped(element: Format, divisor: float | None, threshold: Number, *, two: bool) -> object:
    """Return an element x above the threshold, clipped, where upper is U in units of the divisor."""
    backend, x = Traced(), given("x", element)
    chosen = coefficient.coefficient(backend, Norm(given("U"), divisor, 0.0, 0.0), threshold, split=two)
    if chosen.keep:
        return 0.0
    factors = chosen.wide if element is FLOAT64 else chosen.narrow
    if now(factors.first) == 0.0:
        return 0.0
    return backend.scaled(x, chosen.keep, chosen.blank, factors.first, factors.second)


def _quotient(script: Script, way: Way, *edges: Fraction) -> list[list[Range]]:
    """Split the quotient of threshold and norm, which is at most 1 above the threshold."""
    both = (one for one in operations(way) if one.operation == "/" and isinstance(one.parts[1], Number))
    quotient = next((one for one in both if isinstance(one.parts[0], Number)), None)
    return [] if quotient is None else [split(script.exact(quotient), 0, *edges, 1)]


def _splits(way: Way, threshold: Number, element: Format) -> Splits:
    """Split the quotient where it becomes normal, and where its format does; and the first of two products."""

    def found(script: Script, last: Number | None) -> list[list[Range]]:
        tiny, narrow = Fraction(FLOAT64.tiny), Fraction(FLOAT32.tiny)
        # A float64 quotient below the first edge becomes 0, as it is lowered below the normal range.
        wide = tiny * (1 + coefficient.LOWERED_BY / 2 * _ROUNDOFF), 2 * tiny
        ranges = _quotient(script, way, *(wide if element is FLOAT64 else (narrow**2 / 2, 2 * narrow)))
        if last is None:
            return ranges
        for one in operations(way):
            # In units of a divisor.
            if one.operation == "/" and one.parts[0] == threshold and not isinstance(one.parts[1], Number):
                ranges.append(around(script, one))
                break
        first = last.parts[0]
        if isinstance(first, Number) and first.operation == "*" and not isinstance(last.parts[1], Number):
            ranges.append(split(script.exact(first), 0, Fraction(first.format.tiny) * 2**26, HUGE))
        return [*ranges, around(script, last)]

    return found


def _check_products(element: Format, divisor: float | None, margin: str, *, two: bool) -> str:
    target = Target(["x", "C"], ["U"], 1 / Fraction(divisor or 1))
    threshold = given("C")
    found = ways(partial(clipped, element, divisor, threshold, two=two))
    inputs = _IN_LARGE_UNITS if divisor == _LARGE else _INPUTS
    cases = sum(never_above(way, target, inputs, _splits(way, threshold, element)) for way in found)
    return f"{margin}; ranges: {cases}"


def _check_kept(divisor: float | None, *, known: bool) -> str:
    """Check that what stays unchanged was compared: an upper bound of its norm is at most the threshold."""
    norm, error, threshold = given("m"), given("e"), given("C")

    def kept() -> object:
        found = Norm(norm, divisor, error, 0.0)
        if known:
            keep = coefficient.of_number(norm, error, threshold) == coefficient.KEPT
        else:
            keep = bool(coefficient.coefficient(Traced(), found, threshold).keep)
        return coefficient._upper(found) if keep else 0.0

    script, count = Script(), 0
    limit = script.name(threshold if divisor is None else threshold / divisor)
    for way in ways(kept):
        if way.result == 0.0:
            continue
        upper = script.name(way.result)
        compared = [(script.name(small), script.name(large)) for small, large in way.known()]
        # A negative threshold counts as 0.
        if not {(upper, limit), (upper, literal(0.0))} & {*compared}:
            raise Refuted(f"elements are kept where {compared}\n" + "\n".join(script.lines))
        count += 1
    if not count:
        raise Refuted("nothing is ever kept")
    return f"ways: {count}"


def _check_upper() -> str:
    """Prove that upper is not below the norm, which is at most m / (1 - d)."""
    (way,) = ways(lambda: coefficient._upper(Norm(given("m"), None, given("e"), 0.0)))
    script = Script()
    upper = script.name(way.result)
    script.lines += [f"d = e - {PAD} * {literal(_ROUNDOFF)};", "T = m / (1 - d);"]
    hints = [
        f"T - {upper} -> T * (1 - {upper} / T) {{ T <> 0 }};",
        script.ratio(upper, way.result, Target(["m"], ["(1 - d)"])),
        f"(1 - d) / (1b0 - e) -> 1 + {PAD} * {literal(_ROUNDOFF)} / (1b0 - e) {{ 1b0 - e <> 0 }};",
    ]
    ranges = [("e", PAD * _ROUNDOFF, Fraction(1, 2)), ("m", Fraction(2) ** -600, Fraction(2) ** 600)]
    proven(script, ranges, f"T - {upper} <= 0", hints)
    return "3 of 4 u are needed"


def _check_sums() -> str:
    """Prove that the weight of an example in a sum is at most C / U."""
    threshold, upper = given("C"), given("U")

    def weight() -> object:
        rule = rules.rule_for_sums(Namespace(), rules.CLIP, threshold, 0.0)
        return 0.0 if rule.keeps(upper) else rule.weights(Namespace(), upper)

    def splits(way: Way) -> Splits:
        return lambda script, last: [*_quotient(script, way), *([] if last is None else [around(script, last)])]

    cases = sum(never_above(way, Target(["C"], ["U"]), _INPUTS, splits(way)) for way in ways(weight))
    return f"2 of {rules.LOWERED_BY:g} u are needed; ranges: {cases}"


def _factors(way: Way) -> str:
    script = Script()
    return "\n".join([*map(script.name, way.result), *script.lines])


def _check_one_number() -> str:
    """Prove that `of_number` gives what `coefficient` gives: by the same operations, in each of its ways."""
    inputs = given("m"), given("e"), given("C")

    def one(*, as_it_is: bool) -> object:
        found = coefficient.of_number(*inputs, as_it_is=as_it_is)
        return () if found in (None, coefficient.KEPT) else [found[0][0], found[1][0]]

    def both() -> object:
        norm, error, threshold = inputs
        found = coefficient.coefficient(Traced(), Norm(norm, None, error, 0.0), threshold)
        first = now(found.narrow.first)
        plain = isinstance(first, Number) and first.parts[0].parts[1] == coefficient.NARROW_LOWERED
        return () if found.keep or not plain else [now(found.wide.first), first.parts[0]]

    *found, expected = (
        {_factors(way) for way in ways(function) if way.result}
        for function in (partial(one, as_it_is=False), partial(one, as_it_is=True), both)
    )
    if not all(each and each <= expected for each in found):
        raise Refuted(f"of_number computes {found}, coefficient {expected}")
    return "same operations"


def _lines_of_kernels() -> dict[str, list[str]]:
    """Return the operations of `coefficient` as the kernels write them, each once."""
    return {
        "native/settle.cpp": [
            f"kLowered = 1.0 - {rules.LOWERED_BY:.1f} * 0x1p-53, kNarrowLowered = 1.0 - 0x1p-23;",
            "kLeast = 0x1p-126,",
            "upper = norm * (1.0 / (1.0 - error));",
            "keep = upper <= limit;",
            "wide = keep ? 1.0 : limit / upper * kLowered, narrow = keep ? 1.0 : wide * kNarrowLowered;",
            "if (!keep && (!(narrow >= kLeast) || norm * (1.0 - 2.0 * error) <= limit)) return Settled::open;",
        ],
        "backends/torch/gpu_kernels.py": [
            "upper = norm * inflate",
            "keep = finite & (upper <= limit)",
            "narrow = limit / above * lowered * narrow_lowered",
            f"first = tl.where(tiny, narrow * 8.507059173023462e37 * {coefficient._TWICE_ROUNDED!r}, narrow)",
            "first = tl.where(first < 1.1754943508222875e-38, 0.0, first)",
            "second = tl.where(keep, 0.0, tl.where(tiny, 1.1754943508222875e-38, 1.0))",
        ],
    }


def _check_kernels() -> str:
    """Check that the kernels have the operations and constants that are proven above."""
    if coefficient.NARROW_LOWERED != 1.0 - 2.0**-23:
        raise Refuted("the kernels lower float32 by 2^-23")
    wanted = _lines_of_kernels()
    for name, lines in wanted.items():
        text = " ".join((Path(coefficient.__file__).parents[1] / name).read_text().split())
        for line in lines:
            if text.count(line) != 1:
                raise Refuted(f"{name} does not have: {line}")
    return f"{sum(map(len, wanted.values()))} same lines"


def _products(element: Format, divisor: float | None = None, *, two: bool = True) -> Claim:
    name = f"products of {element.name}"
    if divisor is not None:
        name += f", norms in units of 2^{math.log2(divisor):g}"
    elif element is FLOAT64:
        name += ", with two factors" if two else ", with one factor"
    if element is FLOAT64:
        enough, units = (
            ((5, 4) if two and divisor != _LITTLE else (3, 2)),
            "gradclip._src.core.coefficient.LOWERED_BY",
        )
        margin = f"{enough[0]} of {rules.LOWERED_BY:g} u are needed"
        loosened = [Loosened(units, float(enough[1]))]
        sufficient = [Loosened(units, float(enough[0]))]
    else:
        margin, sufficient = "none is left of 2 v", []
        loosened = [Loosened("gradclip._src.core.coefficient.NARROW_LOWERED", 1.0 - 1.9999997 * 2.0**-24)]
        if element is FLOAT32:
            loosened.append(Loosened("gradclip._src.core.coefficient._TWICE_ROUNDED", 1.0 - 0.75 * 2.0**-24))
    check = partial(_check_products, element, divisor, margin, two=two)
    return Claim(name, MODULE, "coefficient.py", check, tuple(loosened), tuple(sufficient))


def claims() -> list[Claim]:
    """Return what is proven here."""

    def claim(name: str, check: Callable[[], str], *pair: Loosened) -> Claim:
        return Claim(name, MODULE, "coefficient.py", check, pair[:1], pair[1:])

    lowered = "gradclip._src.core.rules.LOWERED"
    doubled = Loosened(f"{MODULE}._in_units_of", lambda norm, threshold: threshold * 2.0 / (norm.divisor or 1.0))
    unproven = Loosened(f"{MODULE}.of_number", lambda norm, error, max_norm: norm > max_norm or coefficient.KEPT)
    return [
        *(_products(element, divisor) for element in (FLOAT64, FLOAT32) for divisor in (_LARGE, _ONE, _LITTLE)),
        claim(
            "upper is not below the norm",
            _check_upper,
            Loosened("coefficient.PAD", 2.5),
            Loosened("coefficient.PAD", 3),
        ),
        _products(FLOAT64, two=False),
        *map(_products, (FLOAT64, FLOAT32, BFLOAT16, FLOAT16)),
        claim(
            "weights of examples in sums",
            _check_sums,
            Loosened(lowered, 1 - 2**-53),
            Loosened(lowered, 1 - 2 * 2**-53),
        ),
        claim("what one known norm keeps", partial(_check_kept, None, known=True), unproven),
        claim("what norms keep", partial(_check_kept, None, known=False), doubled),
        claim("what norms in units keep", partial(_check_kept, _LARGE, known=False), doubled),
        claim("one known norm", _check_one_number, Loosened("gradclip._src.core.coefficient.LOWERED", 1.0)),
        claim("the kernels' operations", _check_kernels, Loosened(f"{MODULE}._TWICE_ROUNDED", 1.0)),
    ]

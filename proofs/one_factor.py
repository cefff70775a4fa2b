"""One number for all elements: the limit up to which they stay, the number, and the products with it.

The number c is a share of own = K / N. Two steps lead to the bound: own is at most that share of (C - A) * (1 - E) / N,
and a product rounded to nearest is at most own * |x|, divided by the share, and what the dtype adds below its normal
range.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

from claim import Claim, Loosened
from gappa import literal
from script import HUGE, Range, Script, Splits, Target, around, literal_ratio, never_above, operations, split
from traced import Namespace, Number, Way, given, now, rounded_to, ways

from gradclip._src.core import one_factor
from gradclip._src.core.formats import BFLOAT16, FLOAT16, FLOAT32, FLOAT64, Format
from gradclip._src.core.norms import EUCLIDEAN, Norm

_MODULE = "gradclip._src.core.one_factor"
_INPUTS: list[Range] = [
    ("C - A", Fraction(2) ** -501, Fraction(2) ** 1024),
    ("E", Fraction(0), Fraction(1, 2)),
    ("N", Fraction(2) ** -502, Fraction(2) ** 1024),
]
_IN_FLOAT32: list[Range] = [
    ("C - A", Fraction(2) ** -61, Fraction(2) ** 100),
    ("E", Fraction(0), Fraction(1, 2)),
    ("N", Fraction(2) ** -62, Fraction(2) ** 128),
]
_LEAST = Fraction(one_factor._HALF_STEP)
SPARED = 0
"""By how many units of roundoff more than the source each proof must find, so that tests can ask for too much."""


def _limits(wide: Format, floor: Any, *, on_device: bool) -> tuple[Any, Any]:
    """Return the limit and K, of a threshold on the host or on a device; the floor is given, or 0."""
    threshold, below, error = (given(name, host=not on_device) for name in ("C", "A", "E"))
    floor = below if floor else 0.0
    if on_device:
        return one_factor._on_device(SimpleNamespace(xp=Namespace(), wide=wide), threshold, below, error, floor)
    return one_factor._limit_and_numerator(threshold, below, floor, error, wide)


def _number(widest: Format, element: Format, wide: Format, *, on_device: bool = False) -> object:
    """Return the number of a dtype, before it becomes float32, and what is rounded on a device without float64."""
    error = given("E", host=not on_device)
    limit, numerator = _limits(wide, floor=False, on_device=on_device)
    found = one_factor._bounds({widest: 1, element: 1}, limit, numerator, stepped=False)
    backend = SimpleNamespace(xp=Namespace(), wide=wide)
    return now(one_factor.factor_of(backend, Norm(given("N", wide), None, error, 0.0), found).factors[element.name])


def _exact(share: Fraction, *more: str) -> Target:
    """Return (C - A) * (1 - E) / N, times a share, as what may not be exceeded."""
    return Target([*more, "(C - A)", "(1b0 - E)"], ["N"], share)


def _share(element: Format) -> Fraction:
    return Fraction(1.0 - one_factor._lost(element))


def _scaled(widest: Format, element: Format, wide: Format, *, on_device: bool = False) -> list[Way]:
    """Return the ways on which elements are scaled, by a finite threshold."""
    found = ways(partial(_number, widest, element, wide, on_device=on_device))
    return [way for way in found if isinstance(way.result, Number) and not any(map(_infinite, way.known()))]


def _infinite(pair: tuple[object, object]) -> bool:
    small, large = pair
    return small in (FLOAT32.largest, FLOAT64.largest) and isinstance(large, Number) and large.operation == "input"


def _check_number(widest: Format, element: Format, *, on_device: bool = False) -> str:
    """Prove that own is at most its share, as far as roundings in float64 go."""
    share = _share(widest) * (_share(element) if element is not widest else 1) * (1 - SPARED * Fraction(1, 2**53))
    # A number below is 0.
    lowest = Fraction(2) ** (-1022 if element is FLOAT64 else -160)
    cases = 0
    for way in _scaled(widest, element, FLOAT64, on_device=on_device):
        if element is not FLOAT64:
            way.result = way.result.parts[0].parts[0]  # without rounding to float32, and half a step
        cases += never_above(way, _exact(share), _INPUTS, _splits(way, [lowest]))
    return f"9 u to spare; ranges: {cases}"


def _splits(way: Way, edges: Sequence[Fraction], *more: Number) -> Splits:
    """Split the quotient at edges, and around where other numbers become normal."""
    both = (one for one in operations(way) if one.operation == "/" and isinstance(one.parts[1], Number))
    quotient = next(both)
    return lambda script, last: [split(script.exact(quotient), *edges, HUGE), *(around(script, one) for one in more)]


def _product(x: Number, number: Number, element: Format) -> Number:
    """Return an element times the number, as frameworks multiply."""
    product = FLOAT64 if element is FLOAT64 else FLOAT32
    return rounded_to(rounded_to(x, product) * number, element)


def _added(element: Format) -> float:
    return one_factor._below_normal({element: 1}, EUCLIDEAN)


def _check_in_float32(widest: Format, element: Format) -> str:
    """Prove the bound where the device computes in float32, from the norm to the product."""
    x, cases = given("x", element), 0
    for way in _scaled(widest, element, FLOAT32):
        way.result = _product(x, way.result, element)
        product = way.result if element is FLOAT32 else way.result.parts[0]
        inputs = [*_IN_FLOAT32, ("x", Fraction(element.step), Fraction(2) ** 128)]
        target = _exact(1 - SPARED * Fraction(1, 2**24), "x")._replace(added=_added(element))
        tiny = Fraction(FLOAT32.tiny)
        edges = tiny / 2**14, tiny * (1 + Fraction(1, 2**13)), 2 * tiny
        cases += never_above(way, target, inputs, _splits(way, edges, product, way.result))
    return f"6 u to spare; ranges: {cases}"


def _all(
    splits: list[list[Range]], rounded: Sequence[Number], script: Script, last: Number | None
) -> list[list[Range]]:
    return [*splits, *(around(script, one) for one in rounded)]


def _check_product(element: Format) -> str:
    """Prove that the product with the number that follows from own is at most x * own, divided by the share."""
    x, own, limit, cases = given("x", element), given("own"), given("limit"), 0
    backend = SimpleNamespace(xp=Namespace(), wide=FLOAT64)
    bounds = one_factor.Bounds(limit, own, {element: 1.0})
    half = literal(one_factor._HALF_STEP)
    for way in ways(lambda: one_factor.factor_of(backend, Norm(1.0, None, 0.0, 0.0), bounds).factors[element.name]):
        if not isinstance(way.result, Number):
            continue
        number = way.result
        way.result = _product(x, number, element)
        product = way.result if way.result.operation == "*" else way.result.parts[0]
        share = 1 / (_share(element) + Fraction(SPARED) * Fraction(element.roundoff))
        target = Target(["x", "own"], factor=share, added=_added(element))
        least = Fraction(2) ** -1022 if element is FLOAT64 else _LEAST
        edges = (
            (least, least * 2, 4)
            if element is FLOAT64
            else (least, Fraction(FLOAT32.tiny) * (1 + Fraction(1, 2**20)), 4)
        )
        inputs = [("x", Fraction(element.step), Fraction(element.largest))]

        def normal(script: Script) -> str:
            return f"(own - {half}) / own -> 1 - {half} / own {{ own <> 0 }};"

        def below(script: Script, number: Number = number, product: Number = product, share: Fraction = share) -> str:
            c, lowered, wide = script.name(number), script.name(number.parts[0]), script.name(product.parts[0])
            errors = f"(({c} - {lowered}) + ({lowered} - (own - {half})) - {half}) / own"
            ratio = f"({wide} * {c}) / T -> (1 + ({wide} - x) / x) * ({literal_ratio(1 / share)} * ({c} / own))"
            return f"{c} / own -> 1 + {errors} {{ own <> 0 }};\n{ratio} {{ own <> 0, x <> 0 }};"

        splits = [split("own", *edges)]
        found = partial(_all, splits, (product, way.result))
        cases += never_above(way, target, inputs, found, *(() if element is FLOAT64 else (normal, below)))
    return f"ranges: {cases}"


def _check_limit(wide: Format, *, on_device: bool = False) -> str:
    """Prove that a norm up to the limit is at most the threshold: N / (1 - E) + A <= C."""
    cases = 0
    for way in ways(lambda: _limits(wide, floor=True, on_device=on_device)[0]):
        if not any(map(_infinite, way.known())):
            cases += never_above(
                way, _exact(1 - SPARED * Fraction(wide.roundoff))._replace(under=()), _INPUTS, lambda script, last: []
            )
    return f"2 u to spare; ranges: {cases}"


def claims() -> list[Claim]:
    """Return what is proven here."""

    def claim(name: str, check: Callable[[], str], *pair: Loosened) -> Claim:
        return Claim(name, _MODULE, "one_factor.py", check, pair[:1], pair[1:])

    spare, inside = "one_factor.SPARED", "gradclip._src.core.one_factor"
    pairs = [(FLOAT64, FLOAT64), (FLOAT64, FLOAT32), (FLOAT32, BFLOAT16), (FLOAT32, FLOAT16)]
    numbers = [
        claim(
            f"the number of {element.name} beside {widest.name}{', threshold on a device' if on_device else ''}",
            partial(_check_number, widest, element, on_device=on_device),
            Loosened(spare, 13),
            Loosened(spare, 9),
        )
        for on_device in (False, True)
        for widest, element in pairs
    ]
    loosened = {
        FLOAT64: Loosened(spare, 2.0**-20),
        FLOAT32: Loosened(f"{inside}._FLOAT32_ROUNDOFF", 0.0),
        BFLOAT16: Loosened(spare, 2.0**-5),
        FLOAT16: Loosened(spare, 2.0**-9),
    }
    products = [
        claim(f"products of {one.name} with the number", partial(_check_product, one), loosened[one])
        for one in loosened
    ]
    devices = [
        claim(
            f"{element.name} beside {widest.name}, without float64",
            partial(_check_in_float32, widest, element),
            Loosened(spare, 16 if element is FLOAT32 else 1024),
            Loosened(spare, 6),
        )
        for widest, element in [(one, one) for one in (FLOAT32, BFLOAT16, FLOAT16)] + pairs[2:]
    ]
    limits = [
        claim(
            f"the limit, in {wide.name}{', threshold on a device' if on_device else ''}",
            partial(_check_limit, wide, on_device=on_device),
            Loosened(spare, 8),
            Loosened(spare, 2),
        )
        for wide, on_device in ((FLOAT64, False), (FLOAT32, False), (FLOAT64, True))
    ]
    return [*numbers, *products, *devices, *limits]

"""Private sums with one example more or less, beside the promise, in exact arithmetic; all else is hostile."""

import inspect
import math
from contextlib import nullcontext
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import gradclip
from attack import shapes, truth
from frameworks import ALL, numpy_dtype
from gradclip._src.core.formats import format_named
from gradclip._src.private.audit.attacks import CROWDS, KINDS, Room

COUNTS = (1, 2, 3, 5, 8, 17, 40)
ROWS = [framework for framework in ALL if not framework.jit]
RELATIONS = ("add_or_remove_one", "replace_one", "zero_out")


def attack(rng):
    """Try one sum of rows, or of the gradients of a loss."""
    (rows if rng.uniform() < 0.6 else losses)(rng)


def squared_distance(first, second):
    """Return the square of the distance of two lists of arrays of finite numbers, exactly."""
    pairs = [zip(x.tolist(), y.tolist(), strict=True) for x, y in zip(first, second, strict=True)]
    return sum((Fraction(a) - Fraction(b)) ** 2 for pair in pairs for a, b in pair if a != b)


def check_distance(first, second, promised, told):
    assert all(np.isfinite(x).all() for x in (*first, *second)), f"not finite: {told}"
    square = squared_distance(first, second)
    share = math.sqrt(square / Fraction(promised) ** 2) if promised else math.inf
    assert square <= Fraction(promised) ** 2, f"{share!r} times the promise {promised!r}: {told}"


# Rows that are given


class Rows(NamedTuple):
    """A batch of rows in float64, and how they are summed."""

    framework: Any
    sizes: tuple
    dtypes: list
    layout: str
    relation: str
    masked: bool
    max_norm: float
    options: dict
    kind: str
    crowd: str
    count: int
    index: int

    def __str__(self):
        return f"{self.framework.name}, " + ", ".join(f"{k}={v!r}" for k, v in list(self._asdict().items())[1:])


def draw_rows(rng):
    framework = ROWS[int(rng.integers(len(ROWS)))]
    names = [dtype for dtype in framework.dtypes if "complex" not in dtype]
    sizes = [(1,), (3,), (4, 1), (17,), (2, 33), (300,)][int(rng.integers(6))]
    dtypes = [str(rng.choice(names)) for _ in sizes]
    count = int(rng.choice(COUNTS))
    options: dict[str, Any] = {"rule": str(rng.choice(["clip", "clip", "normalize", "automatic"]))}
    if rng.integers(4) == 0 and (not framework.name.startswith("jax") or "x64" in framework.name):
        options["grid"] = int(2 ** rng.integers(13, 30))
    elif rng.integers(3) == 0 and framework.name != "jax":
        options["sum_dtype"] = "float64"
    if rng.integers(4) == 0:
        options["per_layer"] = True
    max_norm = float(rng.choice([1.0, 0.1, 3.0, 10.0 ** rng.uniform(-6, 4)]))
    layout = str(rng.choice(["dense", "columns first", "every third", "reversed"]))
    masked = bool(rng.integers(2))
    relation = str(rng.choice(RELATIONS))
    kind, crowd = str(rng.choice(list(KINDS))), str(rng.choice(list(CROWDS)))
    index = int(rng.integers(count))
    return Rows(framework, sizes, dtypes, layout, relation, masked, max_norm, options, kind, crowd, count, index)


def rows(rng):
    """Move one row of a batch, and measure how far the sum moves."""
    case = draw_rows(rng)
    room = Room.of(case.sizes, list(map(format_named, case.dtypes)), case.max_norm)
    with np.errstate(all="ignore"):
        example = room.within(KINDS[case.kind](rng, room))
        batch = room.within(CROWDS[case.crowd](rng, room, case.count, example))
    batch[case.index] = example
    told = f"{case}, example {np.array2string(example, threshold=6)}"
    first, second = summed(case, batch, None), summed(case, *neighbour(case, batch))
    check_distance(first, second, promised(case), told)
    check_alone(case, batch, first, told)


def neighbour(case, batch):
    """Return the batch with one row less, or moved, and its mask."""
    others = np.arange(case.count) != case.index
    if case.relation == "add_or_remove_one":
        return (batch, others) if case.masked or case.count == 1 else (batch[others], None)
    other = batch.copy()
    other[case.index] = -batch[case.index] if case.relation == "replace_one" else 0.0
    return other, None


def promised(case):
    """Return how far the sum may move; on a grid in steps."""
    if "grid" in case.options:
        return case.options["grid"] * (2 if case.relation == "replace_one" else 1)
    known = {name: case.options[name] for name in ("rule", "per_layer", "sum_dtype") if name in case.options}
    return gradclip.clipped_sum_sensitivity(
        case.max_norm,
        case.relation,
        batch_size=case.count,
        layout=gradclip.SumLayout(elements=sum(case.sizes)),
        **known,
    ).total


def check_alone(case, batch, total, told):
    """Check the bound of the row by itself, and on a grid that it adds the same as alone."""
    alone = summed(case, batch, np.arange(case.count) == case.index)
    grid = case.options.get("grid")
    roundoff = 0 if grid or "sum_dtype" in case.options else Fraction(2) ** -24
    largest = Fraction(grid or case.max_norm) * (1 + roundoff) + Fraction(2.0**-126) * sum(case.sizes)
    assert truth.at_most(alone, 2, largest), f"one row adds {float(truth.norm(alone, 2))!r}: {told}"
    if grid:
        rest = summed(case, batch, np.arange(case.count) != case.index)
        assert all((a + b == c).all() for a, b, c in zip(alone, rest, total, strict=True)), f"rows interfere: {told}"


def summed(case, batch, mask):
    """Return the sums, in NumPy, of a batch laid out as the case says."""
    pieces = np.split(batch, np.cumsum(case.sizes)[:-1], axis=1)
    with case.framework.mode(), np.errstate(over="ignore", invalid="ignore"):
        leaves = [
            laid_out(case, piece.astype(numpy_dtype(dtype))) for piece, dtype in zip(pieces, case.dtypes, strict=True)
        ]
        total, _ = gradclip.per_example_clip(leaves, case.max_norm, mask=mask, **case.options)
        return [shapes.numbers(x) for x in total]


def laid_out(case, piece):
    if case.framework.name.startswith("jax"):
        return jnp.asarray(piece)
    torches = case.framework.name.startswith("torch")
    own = shapes.as_tensor if torches else np.copy
    if case.layout == "columns first":
        return own(np.ascontiguousarray(piece.T)).T
    if case.layout == "every third":
        return own(np.repeat(piece, 3, axis=1))[:, ::3]
    if case.layout == "reversed" and not torches:
        return piece[::-1, ::-1].copy()[::-1, ::-1]
    return own(piece)


# Losses with a kink where the labels are


class Loss(NamedTuple):
    """A batch of rows that point one way, whose labels are what the model predicts, and how gradients are summed."""

    mode: str
    dtype: str
    count: int
    width: int
    way: str
    grid: Any
    relation: str
    index: int

    def __str__(self):
        return ", ".join(f"{k}={v!r}" for k, v in self._asdict().items())


def _padded(count):
    return {"pad_to": count}


WAYS = {
    "as it comes": lambda count: {},
    "mask": lambda count: {},
    "microbatches of 1": lambda count: {"microbatch_size": 1},
    "microbatches of 4": lambda count: {"microbatch_size": 4},
    "padded": _padded,
    "padded, microbatches of 8": lambda count: {"pad_to": count, "microbatch_size": 8},
}


def ways():
    """Return the ways to call that there are."""
    known = inspect.signature(gradclip.clipped_grad).parameters
    return [name for name, settings in WAYS.items() if set(settings(1)) <= set(known)]


def losses(rng):
    """Take one example from a batch, or move it, where each gradient hangs on the last bit of a prediction."""
    case = Loss(
        str(rng.choice(["torch", "torch loop", "jax", "jax jit"])),
        str(rng.choice(["float32", "float32", "float64"])),
        int(rng.choice([2, 3, 5, 8, 9, 17, 24, 33])),
        int(rng.choice([1, 3, 8, 16, 31, 64])),
        str(rng.choice(ways())),
        (2**20) if rng.integers(4) == 0 else None,
        str(rng.choice(RELATIONS)),
        0,
    )
    case = case._replace(index=int(rng.integers(case.count)))
    if case.grid and case.dtype == "float32" and "jax" in case.mode:
        case = case._replace(grid=None)
    direction, w = rng.normal(size=(2, case.width))
    x = rng.normal(size=(case.count, 1)) * direction if rng.integers(4) else rng.normal(size=(case.count, case.width))
    with jax.enable_x64(case.dtype == "float64") if "jax" in case.mode else nullcontext():
        measure_loss(case, w, x)


def measure_loss(case, w, x):
    torches = "torch" in case.mode
    array = (lambda v: torch.tensor(v.astype(case.dtype))) if torches else (lambda v: jnp.asarray(v.astype(case.dtype)))
    xp = torch if torches else jnp
    w, x = array(w), array(x)
    y = x @ w

    def loss(w, x, y):
        return xp.abs(x @ w - y).sum()

    settings = WAYS[case.way](case.count) | ({"method": "loop"} if "loop" in case.mode else {})
    clipped = gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), grid=case.grid, **settings)
    try:
        promised = clipped.sensitivity(
            case.relation, batch_size=case.count, layout=gradclip.SumLayout(elements=case.width)
        ).total
    except ValueError:
        return  # nothing is promised for this
    gap = clipped.sensitivity(case.relation).keeps_places
    call = jax.jit(clipped) if "jit" in case.mode else clipped
    batches = [(w, x, y, None), moved(case, xp, w, x, y, gap)]
    sums = [shapes.numbers(call(*args) if mask is None else call(*args, mask=mask)) for *args, mask in batches]
    limit = promised * (case.grid or 1)
    check_distance([sums[0]], [sums[1]], limit, f"clipped_grad: {case}")


def moved(case, xp, w, x, y, gap):
    """Return the batch with one example less, or another. `gap`: the example that is left out leaves a gap."""
    keep = np.arange(case.count) != case.index
    kept = torch.tensor(keep) if xp is torch else jnp.asarray(keep)
    if case.relation == "add_or_remove_one":
        return (w, x, y, kept) if gap else (w, x[kept], y[kept], None)
    other = xp.where(kept[:, None], x, -x if case.relation == "replace_one" else xp.zeros_like(x))
    return w, other, xp.where(kept, y, xp.zeros_like(y)), None

"""Norms and clips of gradients that several hold: parts in turn, devices of JAX, real processes, beside one holder."""

import math
import os
import pickle
from fractions import Fraction
from unittest import mock

import jax
import numpy as np

import gradclip
import processes
from attack import shapes, truth
from frameworks import ALL

ORDERS = (2, 2, 1, 1.5, 3, 8, math.inf, -math.inf)
HOSTS = [framework for framework in ALL if not framework.jit]
DEVICES = 8


def attack(rng):
    """Split one tree among several; where JAX has eight devices, sometimes among these."""
    if len(jax.devices()) >= DEVICES and rng.uniform() < 0.1:
        over_devices(rng)
    else:
        parts(rng)


def parts(rng):
    """Measure the parts of a tree one by one, in any order and grouping, and clip each by the norm of all."""
    framework = HOSTS[int(rng.integers(len(HOSTS)))]
    ord = float(rng.choice(ORDERS))
    dtypes = [str(rng.choice(framework.dtypes)) for _ in range(int(rng.integers(1, 4)))]
    leaves = [shapes.leaf(rng, dtype, int(rng.choice(shapes.SIZES))) for dtype in dtypes]
    held = [part for x in leaves for part in np.array_split(x, int(rng.integers(1, 6)))]
    order = rng.permutation(len(held))
    cuts = sorted(rng.integers(0, len(held) + 1, size=int(rng.integers(0, 4))))
    trees = [[held[i] for i in group] for group in np.split(order, cuts)]
    exact = truth.norm(leaves, ord)
    max_norm = shapes.threshold(rng, leaves, ord, exact)
    told = f"{framework.name}, ord={ord}, max_norm={max_norm!r}, parts {trees}"
    with framework.mode():
        given = [[framework.from_numpy(x) for x in tree] for tree in trees]
        whole = combined(rng, [gradclip.partial_norm(tree, ord) for tree in given])
        clipped = [whole.clip(tree, max_norm) for tree in given]
    results = [shapes.numbers(x) for tree in clipped for x in tree]
    lost = flushed(framework, dtypes, leaves, ord)
    check_whole(whole.norm, exact, lost, told)
    assert truth.at_most(results, ord, max_norm), f"the norm {float(truth.norm(results, ord))!r} is too large: {told}"
    slack = Fraction(max(0.01 if dtype in ("float16", "bfloat16") else 1e-5 for dtype in dtypes))
    least = (exact if max_norm == math.inf else min(exact, Fraction(max_norm))) * (1 - slack) - 3 * lost
    assert ord < 0 or truth.norm(results, ord) >= least, f"{float(truth.norm(results, ord))!r} is too small: {told}"


def flushed(framework, dtypes, leaves, ord):
    """Return what may be lost of numbers below the normal range."""
    flushes = framework.traced or framework.name.startswith("jax")
    bounds = [shapes.limits(dtype) for dtype in dtypes]
    largest = max(bound.normal if flushes else bound.step for bound in bounds)
    count = sum(2 * x.size for x in leaves)
    return Fraction(largest) * Fraction(1 if math.isinf(ord) else count ** (1 / ord)) * 2


def combined(rng, norms):
    """Add up partial norms in a random order, two at a time, some of them after a journey as bytes."""
    norms = list(norms)
    while len(norms) > 1:
        i, j = rng.choice(len(norms), size=2, replace=False)
        both = norms[i] + norms[j]
        both = pickle.loads(pickle.dumps(both)) if rng.integers(2) else both
        norms = [norm for k, norm in enumerate(norms) if k not in (i, j)] + [both]
    return norms[0]


def check_whole(norm, exact, lost, told):
    if exact > Fraction(1.797e308):
        assert norm > 1.79e308, f"the norm is {norm!r}, and beyond the range: {told}"
        return
    assert math.isfinite(norm), f"the norm is {norm!r}: {told}"
    assert abs(Fraction(norm) - exact) <= exact * Fraction(2e-12) + lost, f"{norm!r} for {float(exact)!r}: {told}"


def over_devices(rng):
    """Clip a tree that lies on a mesh of devices, under `jit`, beside exact arithmetic and one device."""
    from sharded_jax import layouts

    kind = layouts.AxisType.Auto if rng.integers(2) else layouts.AxisType.Explicit
    seed, ord = int(rng.integers(2**31)), float(rng.choice([1, 2, 3, math.inf, -math.inf]))
    max_norm = float(10.0 ** rng.uniform(-3, 4))

    def clip(tree):
        return gradclip.clip_by_global_norm(tree, max_norm, ord=ord)

    with jax.enable_x64(True):
        layout = layouts.draw(seed, kind)
        with jax.set_mesh(layout.mesh):
            results, norm = jax.jit(clip)(layout.tree)
        layouts.assert_same(results, norm, *clip(layout.whole))
        layouts.assert_bound(results, ord, max_norm)
        places = zip(results, layout.tree, strict=True)
        assert all(y.sharding.is_equivalent_to(x.sharding, x.ndim) for y, x in places), f"{seed}: placed otherwise"


def over_processes(rng, world=4, draws=10):
    """Lay out gradients over real processes; these draw some layouts, beginning with a seed that is drawn here."""
    _drawn_by("drawn.py", rng, world, draws)


def mistakes(rng, world=3, draws=200):
    """Have one of several real processes make mistakes; all must raise, and none may wait."""
    _drawn_by("mistaken.py", rng, world, draws)


def _drawn_by(script, rng, world, draws):
    first = int(rng.integers(2**20))
    with mock.patch.dict(os.environ, FIRST_DRAW=str(first), DRAWS=str(draws)):
        found = processes.results(world, script, timeout=300)
    wanted = {case: dict.fromkeys(range(world)) for case in processes.names_of_cases(script)}
    assert found == wanted, f"from the seed {first}, {draws} draws, {world} processes: {found}"

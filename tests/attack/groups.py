"""Random parameter groups with thresholds, and thresholds by name: each part beside a call on it alone, and exactly."""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np

import gradclip
from attack import shapes, truth
from frameworks import WITH_FLOAT32

EAGER = [framework for framework in WITH_FLOAT32 if not framework.jit]
ORDERS = (2, 2, 2, 1, 1.5, 3, math.inf)
POLICIES = ("propagate", "drop", "zero")


def attack(rng):
    """Draw groups of gradients, their thresholds and how they are passed; clip, and check each part."""
    framework = EAGER[int(rng.integers(len(EAGER)))]
    ord, policy = float(rng.choice(ORDERS)), str(rng.choice(POLICIES))
    names = [dtype for dtype in framework.dtypes if "complex" not in dtype]
    parts = [_part(rng, names) for _ in range(int(rng.integers(1, 5)))]
    limits = [_limit(rng, part, ord) for part in parts]
    bad = rng.integers(6) == 0 and any(map(len, parts))
    if bad:
        number = int(rng.choice([number for number, part in enumerate(parts) if part]))
        spoiled = shapes.spoiled(rng, parts[number])
        bad = not all(np.isfinite(x.astype(np.float64)).all() for x in spoiled)
        parts[number] = spoiled
    told = f"{framework.name}, ord={ord}, {policy}, limits {limits}, parts {parts}"
    with framework.mode(), np.errstate(all="ignore"):
        held = [[SimpleNamespace(grad=framework.from_numpy(x.copy())) for x in part] for part in parts]
        alone = [[SimpleNamespace(grad=framework.from_numpy(x.copy())) for x in part] for part in parts]
        norm = float(_clip(rng, framework, held, limits, ord, policy))
        if not bad or policy == "zero":
            for part, limit in zip(alone, limits, strict=True):
                if part and limit is not None:
                    gradclip.clip_grad_norm_(part, limit, ord, nonfinite=policy)
        results = [[_numbers(framework, one) for one in part] for part in held]
        wanted = [[_numbers(framework, one) for one in part] for part in alone]
    if bad and policy != "zero":
        assert not math.isfinite(norm), told
        for x in (x for part in results for x in part if x.size):
            assert (np.isnan(x) if policy == "propagate" else x == 0).all(), told
        return
    finite = [[np.where(np.isfinite(x), x, 0) for x in map(_wide, part)] for part in parts]
    _check(framework, (results, wanted, finite), limits, ord, told)
    _check_norm(norm, [x for part in finite for x in part], ord, told)


def _part(rng, names):
    return [shapes.leaf(rng, str(rng.choice(names)), int(rng.integers(1, 30))) for _ in range(int(rng.integers(0, 4)))]


def _limit(rng, part, ord):
    if rng.integers(5) == 0:
        return None
    return shapes.threshold(rng, part, ord, truth.norm(part, ord)) if part else float(rng.uniform())


def _clip(rng, framework, held, limits, ord, policy):
    """Clip the parts in one call, passed in one of the ways."""
    way = int(rng.integers(3))
    if way == 0:
        named = {f"part{number}.{place}": one for number, part in enumerate(held) for place, one in enumerate(part)}
        patterns = {f"part{number}.*": limit for number, limit in enumerate(limits) if held[number]}
        if not named:
            named, patterns = {"none": SimpleNamespace(grad=framework.array([0.0]))}, {"*": None}
        return gradclip.clip_grad_norm_(named, patterns, ord, nonfinite=policy)
    groups = [{"params": part, "max_norm": limit} for part, limit in zip(held, limits, strict=True)]
    common = 1.0
    if way == 1 and limits[0] is not None:
        common = limits[0]
        groups[0] = {"params": held[0]}
    order = rng.permutation(len(groups))
    groups = [groups[place] for place in order]
    if not any(held):
        groups.append({"params": [SimpleNamespace(grad=framework.array([0.0]))], "max_norm": None})
    return gradclip.clip_grad_norm_(groups, common, ord, nonfinite=policy)


def _wide(x):
    return np.asarray(x).astype(np.float64)


def _numbers(framework, one):
    return _wide(framework.to_numpy(one.grad))


def _check(framework, found, limits, ord, told):
    for result, wanted, finite, limit in zip(*found, limits, strict=True):
        if limit is not None:
            assert not result or truth.at_most(result, ord, limit), f"above {limit!r}: {told}"
        for one, other, x in zip(result, wanted, finite, strict=True):
            same = other if limit is not None else x
            assert np.array_equal(one, same), f"{one} where a call for the part gives {same}: {told}"


def _check_norm(norm, leaves, ord, told):
    exact = truth.norm(leaves, ord) if leaves else Fraction(0)
    if exact > Fraction(3.4e38):
        return
    near = abs(Fraction(norm) - exact) <= exact * Fraction(2e-6) + Fraction(2) ** -148
    assert near, f"the norm is {norm!r}, and exactly {float(exact)!r}: {told}"

"""Steps of any optimizer that clip: closures, scales, policies and skipped steps, beside float64 and a plain step."""

import math
from typing import NamedTuple

import numpy as np
import torch

import gradclip
from gradclip import clip_at_step

MAKE = {
    "SGD": lambda p, **how: torch.optim.SGD(p, lr=0.1, **how),
    "momentum": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, **how),
    "AdamW": lambda p, **how: torch.optim.AdamW(p, lr=0.01, **how),
    "Adagrad": lambda p, **how: torch.optim.Adagrad(p, lr=0.1, **how),
    "RMSprop": lambda p, **how: torch.optim.RMSprop(p, lr=0.01, **{k: v for k, v in how.items() if k != "fused"}),
}
HOW = ({}, {"fused": True}, {"foreach": True}, {"foreach": False})
SHAPES = ((), (1,), (5,), (4, 6))
STEPS = 8
SKIP_ABOVE = 4.0


class Case(NamedTuple):
    """An optimizer, how its steps are called, and the gradient of each step."""

    optimizer: str
    how: dict
    call: str
    nonfinite: str
    max_norm: float | None
    skips: bool
    gradients: list


def draw(rng):
    shapes = [SHAPES[int(rng.integers(len(SHAPES)))] for _ in range(int(rng.integers(1, 4)))]
    call = str(rng.choice(["step", "closure", "keyword", "scaler", "unscale"]))
    nonfinite = str(rng.choice(["propagate", "skip", "zero"]))
    how = HOW[int(rng.integers(len(HOW)))]
    if nonfinite == "zero" and call == "scaler" and how.get("fused"):
        call = "unscale"
    max_norm = None if rng.integers(2) else float(rng.choice([0.0, 0.1, 1.0, 3.0, 100.0, math.inf]))
    gradients = [_gradient(rng, shapes, nonfinite != "propagate" or "scale" in call) for _ in range(STEPS)]
    return Case(str(rng.choice(list(MAKE))), how, call, nonfinite, max_norm, bool(rng.integers(2)), gradients)


def _gradient(rng, shapes, may_spoil):
    size = 10.0 ** rng.uniform(-2, 2)
    gradient = [(rng.standard_normal(shape) * size).astype(np.float32) for shape in shapes]
    if may_spoil and rng.integers(4) == 0:
        gradient[0] = np.full_like(gradient[0], rng.choice([np.nan, np.inf]))
    return gradient


def attack(rng):
    """Take the steps of one case, and beside them plain steps with gradients that float64 has clipped; compare."""
    case = draw(rng)
    ours, theirs = ([torch.nn.Parameter(torch.ones(x.shape)) for x in case.gradients[0]] for _ in range(2))
    # PyTorch's fused RMSprop does not exist, and the plain steps are those of other kernels where there are some.
    one, other = MAKE[case.optimizer](ours, **case.how), MAKE[case.optimizer](theirs)
    adaptive = gradclip.AdaptiveThreshold(skip_above=SKIP_ABOVE if case.skips else math.inf)
    monitor = gradclip.Monitor()
    max_norm = adaptive if case.max_norm is None else case.max_norm
    clipping = clip_at_step(one, max_norm, nonfinite=case.nonfinite, monitor=monitor)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=case.call in ("scaler", "unscale"))
    scaler.scale(torch.zeros(()))
    for gradient in case.gradients:
        steps = clipping.steps
        _step(case, one, ours, gradient, scaler)
        expected = _expected(case, gradient, clipping, stepped=clipping.steps > steps)
        if expected is not None:
            for p, x in zip(theirs, expected, strict=True):
                p.grad = torch.tensor(x.astype(np.float32))
            other.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4, msg=lambda told: f"{told} in {case}")
    assert monitor.steps == clipping.steps, case


def _step(case, optimizer, params, gradient, scaler):
    scale = float(scaler.get_scale())

    def closure():
        for p, x in zip(params, gradient, strict=True):
            p.grad = torch.tensor(x * np.float32(scale))
        return 1.0

    if case.call == "closure":
        assert optimizer.step(closure) == 1.0, case
    elif case.call == "keyword":
        assert optimizer.step(closure=closure) == 1.0, case
    else:
        closure()
        if case.call == "unscale":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


def _expected(case, gradient, clipping, *, stepped):
    """Return the gradients that the update uses, in float64; None if the step is skipped."""
    wide = [x.astype(np.float64) for x in gradient]
    finite = all(np.isfinite(x).all() for x in wide)
    if not finite and (case.call in ("scaler", "unscale") or case.nonfinite == "skip"):
        return None
    wide = [np.where(np.isfinite(x), x, 0.0) for x in wide]
    norm, threshold = math.sqrt(sum((x**2).sum() for x in wide)), float(clipping.threshold)
    assert stepped, case
    assert math.isclose(float(clipping.norm), norm, rel_tol=1e-5, abs_tol=1e-12), (float(clipping.norm), norm, case)
    if case.max_norm is None and case.skips and norm > SKIP_ABOVE * threshold:
        return None
    return [x * (1.0 if norm <= threshold else threshold / norm) for x in wide]

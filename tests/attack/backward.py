"""Clipping within backward passes in which gradients share memory: each is clipped, and none is touched otherwise."""

import math

import numpy as np
import torch

from attack.truth import at_most
from gradclip.integrations.torch import clip_in_backward

COLUMNS = 3

# Uses of a parameter, which return a matrix of `rows` rows. Some hand on the memory of the gradient they receive.
DENSE = {
    "itself": lambda p, rows, rng: p,
    "a view": lambda p, rows, rng: p.view(-1).view(rows, COLUMNS),
    "twice transposed": lambda p, rows, rng: p.t().t(),
    "times two": lambda p, rows, rng: p * 2.0,
    "minus": lambda p, rows, rng: -p,
    "added to itself": lambda p, rows, rng: p + p.clone(),
}


def _rows_of_a_table(p, rows, rng):
    places = torch.from_numpy(rng.integers(0, len(p), rows))
    return torch.nn.functional.embedding(places, p, sparse=True)


def uses(rng):
    """Return the name and shape of each parameter, and a function from its tensor to a matrix."""
    rows, found = int(rng.integers(1, 4)), []
    for _ in range(int(rng.integers(2, 6))):
        kind = str(rng.choice([*DENSE, "sparse", "one row"]))
        name = str(rng.choice(["w", "b", "w (2)"]))
        if kind == "sparse":
            found.append((name, (5, COLUMNS), _rows_of_a_table))
        elif kind == "one row":
            found.append((name, (1, COLUMNS), lambda p, rows, rng: p.expand(rows, COLUMNS)))
        else:
            found.append((name, (rows, COLUMNS), DENSE[kind]))
    return rows, found


def gradients(chosen, rows, seed, max_norms):
    """Return the gradients and recorded norms of a backward pass that clips where a threshold is finite."""
    rng = np.random.default_rng(seed)
    named = [(name, torch.nn.Parameter(torch.zeros(shape))) for name, shape, _ in chosen]
    norms = []
    if max_norms is not None:
        before = clip_in_backward(named, math.inf)
        before.remove()
        names = list(before.thresholds)
        clipping = clip_in_backward(named, dict(zip(names, max_norms, strict=True)))
    # What is computed first has its gradient last.
    terms = [use(p, rows, rng) for (_, p), (_, _, use) in zip(named, chosen, strict=True)]
    order = rng.permutation(len(terms))
    factors = torch.from_numpy(rng.normal(size=(rows, COLUMNS)).astype(np.float32))
    (sum(terms[place] for place in order) * factors).sum().backward()
    if max_norms is not None:
        norms = [float(clipping.norms[name]) for name in names]
    return [p.grad.to_dense().numpy() for _, p in named], norms


def attack(rng):
    """Clip some parameters of a loss, and compare all gradients with those of the loss without clipping."""
    rows, chosen = uses(rng)
    seed = int(rng.integers(2**31))
    max_norms = [float(rng.choice([math.inf, 0.5, 1e-3, 100.0])) for _ in chosen]
    wanted, _ = gradients(chosen, rows, seed, None)
    found, norms = gradients(chosen, rows, seed, max_norms)
    for x, y, norm, max_norm in zip(wanted, found, norms, max_norms, strict=True):
        told = f"{y} from {x} with max_norm {max_norm} and norm {norm}: {chosen}"
        true = float(np.linalg.norm(x.astype(np.float64)))
        assert math.isclose(norm, true, rel_tol=1e-5, abs_tol=1e-30), told
        if true < max_norm * (1 - 1e-6):
            assert (x == y).all(), told
        else:
            assert at_most([y], 2, max_norm), told
            assert np.allclose(y, x * (max_norm / true), rtol=1e-4, atol=1e-30), told

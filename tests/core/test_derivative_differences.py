"""Derivatives beside finite differences of the NumPy function in float64: both modes, and one on top of the other."""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import gradclip

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),  # PyTorch's own first jvp
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),  # torch.func.linearize
    pytest.mark.filterwarnings("ignore:.*batching rule for aten..conj_physical:UserWarning"),
]
ORDERS = (1, 2, 3, "inf", "-inf")
RULES = ("clip", "normalize", "automatic")
X = np.array([0.4, -0.7, 1.1, 2.3, -0.2, 0.9, 1.7, -1.3, 0.6])  # three examples of a leaf (2,) and one of ()
DX = np.array([0.3, 1.1, -0.6, 0.2, 0.8, -1.2, 0.5, -0.4, 0.9])
DC = 0.7
THRESHOLDS = (0.15, 50.0)  # everything is clipped, nothing is
STEP = 1e-6


@dataclass(frozen=True)
class Case:
    """One of our functions, of a tree and a threshold, as one of nine numbers and a threshold that returns a vector."""

    name: str
    of_tree: Callable[[Any, Any], Any]
    complex: bool = False

    def __call__(self, x: Any, c: Any) -> Any:
        xp = np if isinstance(x, np.ndarray) else torch if isinstance(x, torch.Tensor) else jnp
        w = x[:6].reshape(3, 2)
        if self.complex:
            w = torch.complex(w[:, 0], w[:, 1]) if xp is torch else w[:, 0] + 1j * w[:, 1]
        leaves = leaves_of(self.of_tree({"w": w, "b": x[6:]}, c))
        parts = [part.reshape(-1) for leaf in leaves for part in parts_of(leaf)]
        return (torch.cat if xp is torch else xp.concatenate)(parts)

    def change(self, c: float) -> np.ndarray:
        ahead, behind = self(X + STEP * DX, np.float64(c + STEP * DC)), self(X - STEP * DX, np.float64(c - STEP * DC))
        return (ahead - behind) / (2 * STEP)


def leaves_of(tree):
    if isinstance(tree, dict):
        return [leaf for key in sorted(tree) for leaf in leaves_of(tree[key])]
    return [leaf for part in tree for leaf in leaves_of(part)] if isinstance(tree, tuple) else [tree]


def parts_of(leaf):
    if "int" in str(leaf.dtype):
        return []
    return [leaf.real, leaf.imag] if "complex" in str(leaf.dtype) else [leaf]


def per_example(**options):
    return lambda tree, c: gradclip.per_example_clip(tree, c, **options)


def by_ord(name, function):
    return [Case(f"{name} {ord}", lambda tree, c, ord=ord: function(tree, c, ord=ord)) for ord in ORDERS]


CASES = (
    *by_ord("global_norm", lambda tree, c, ord: gradclip.global_norm(tree, ord)),
    *by_ord("layer_norms", lambda tree, c, ord: gradclip.layer_norms(tree, ord)),
    *by_ord("clip_by_global_norm", gradclip.clip_by_global_norm),
    *by_ord("clip_by_layer_norm", gradclip.clip_by_layer_norm),
    Case("clip_by_layer_norm thresholds", lambda tree, c: gradclip.clip_by_layer_norm(tree, {"w": c, "b": 2 * c})),
    Case("clip_by_global_norm complex", gradclip.clip_by_global_norm, complex=True),
    Case("clip_by_global_norm complex 3", lambda tree, c: gradclip.clip_by_global_norm(tree, c, ord=3), complex=True),
    Case("clip_by_value", gradclip.clip_by_value),
    *(Case(f"per_example {rule}", per_example(rule=rule)) for rule in RULES),
    *(Case(f"per_example {rule} to_unit", per_example(rule=rule, to_unit=True)) for rule in RULES),
    Case("per_example per_layer", per_example(per_layer=True)),
    Case("per_example per_layer by size", per_example(per_layer=True, uniform=False, rule="automatic")),
    Case("per_example thresholds", lambda tree, c: gradclip.per_example_clip(tree, {"w": c, "b": 2 * c})),
    Case("per_example mask", per_example(mask=np.array([True, False, True]))),
    Case("per_example zero", per_example(nonfinite="zero")),
    Case("per_example complex", per_example(), complex=True),
)
CASE_OF = {case.name: case for case in CASES}
every_case = pytest.mark.parametrize("case", CASES, ids=operator.attrgetter("name"))


def some_cases(*names):
    return pytest.mark.parametrize("case", [CASE_OF[name] for name in names], ids=operator.attrgetter("name"))


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def by_forward_ad(function, x, c, dx, dc):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, dx), forward_ad.make_dual(c, dc))).tangent


def by_autograd(function, x, c, weights):
    x, c = x.clone().requires_grad_(), c.clone().requires_grad_()
    return torch.autograd.grad(function(x, c), (x, c), weights, materialize_grads=True)


FORWARD = {
    "func.jvp": lambda function, x, c, dx, dc: torch.func.jvp(function, (x, c), (dx, dc))[1],
    "forward_ad": by_forward_ad,
    "func.linearize": lambda function, x, c, dx, dc: torch.func.linearize(function, x, c)[1](dx, dc),
    "func.jacfwd": lambda function, x, c, dx, dc: (
        (jacobians := torch.func.jacfwd(function, (0, 1))(x, c))[0] @ dx + jacobians[1] * dc
    ),
}
REVERSE = {
    "func.vjp": lambda function, x, c, weights: torch.func.vjp(function, x, c)[1](weights),
    "autograd": by_autograd,
    "func.jacrev": lambda function, x, c, weights: [weights @ j for j in torch.func.jacrev(function, (0, 1))(x, c)],
}


@every_case
@pytest.mark.parametrize("mode", ["func.jvp", "forward_ad"])
def test_torch_forward(case, mode):
    for c in THRESHOLDS:
        got = FORWARD[mode](case, tensor(X), tensor(c), tensor(DX), tensor(DC))
        np.testing.assert_allclose(got, case.change(c), rtol=1e-7, atol=2e-9)


@every_case
@pytest.mark.parametrize("mode", ["func.vjp", "autograd"])
def test_torch_reverse(case, mode):
    for c in THRESHOLDS:
        want = case.change(c)
        weights = np.cos(np.arange(want.size))
        gx, gc = REVERSE[mode](case, tensor(X), tensor(c), tensor(weights))
        np.testing.assert_allclose(gx @ tensor(DX) + gc * DC, weights @ want, rtol=1e-7, atol=2e-8)


FEW = ("global_norm 2", "clip_by_global_norm 2", "clip_by_layer_norm inf", "clip_by_value", "per_example automatic")


@some_cases(*FEW)
def test_torch_whole_jacobians_and_linearize(case):
    want = case.change(THRESHOLDS[0])
    for mode in ("func.jacfwd", "func.linearize"):
        got = FORWARD[mode](case, tensor(X), tensor(0.15), tensor(DX), tensor(DC))
        np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-9)
    weights = np.cos(np.arange(want.size))
    gx, gc = REVERSE["func.jacrev"](case, tensor(X), tensor(0.15), tensor(weights))
    np.testing.assert_allclose(gx @ tensor(DX) + gc * DC, weights @ want, rtol=1e-7)


@every_case
def test_jax_both_modes(case):
    with jax.enable_x64(True):
        for c in THRESHOLDS:
            want = case.change(c)
            x, c = jnp.array(X), jnp.array(c)
            value, pull = jax.vjp(case, x, c)
            np.testing.assert_allclose(
                jax.jvp(case, (x, c), (jnp.array(DX), jnp.array(DC)))[1], want, rtol=1e-7, atol=2e-9
            )
            weights = np.cos(np.arange(value.size))
            gx, gc = map(np.asarray, pull(jnp.array(weights)))
            np.testing.assert_allclose(gx @ DX + gc * DC, weights @ want, rtol=1e-7, atol=2e-8)


SECOND = ("global_norm 3", "clip_by_global_norm 2", "clip_by_global_norm complex", "per_example automatic")
SECOND_MODES = {
    "hessian": torch.func.hessian,
    "reverse over reverse": lambda f: torch.func.jacrev(torch.func.jacrev(f)),
    "reverse over forward": lambda f: torch.func.jacrev(torch.func.jacfwd(f)),
    "forward over forward": lambda f: torch.func.jacfwd(torch.func.jacfwd(f)),
    "autograd": lambda f: lambda v: torch.autograd.functional.hessian(f, v),
    "over a batch": lambda f: lambda v: torch.func.vmap(torch.func.hessian(f))(torch.stack([v, v + 1]))[0],
}


@some_cases(*SECOND)
@pytest.mark.parametrize("mode", SECOND_MODES)
def test_torch_second_derivatives(case, mode):
    weights = torch.cos(torch.arange(case(X, 0.15).size, dtype=torch.float64))

    def value(v):
        return weights @ case(v[:9], v[9])

    where, step = tensor([*X, 0.15]), tensor([*DX, DC]) * STEP
    gradient = torch.func.grad(value)
    want = (gradient(where + step) - gradient(where - step)) / (2 * STEP)
    got = SECOND_MODES[mode](value)(where) @ tensor([*DX, DC])
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8)


VMAPPED = {
    "jvp of vmap": lambda f, v, d: torch.func.jvp(lambda v: torch.func.vmap(f)(torch.stack([v, v])).sum(), (v,), (d,))[
        1
    ],
    "grad of vmap": lambda f, v, d: torch.func.grad(lambda v: torch.func.vmap(f)(torch.stack([v, v])).sum())(v) @ d,
    "vmap of jvp": lambda f, v, d: sum(
        torch.func.vmap(lambda v: torch.func.jvp(f, (v,), (d,))[1])(torch.stack([v, v]))
    ),
    "vmap of grad": lambda f, v, d: sum(torch.func.vmap(torch.func.grad(f))(torch.stack([v, v])) @ d),
}


@some_cases(*FEW, "per_example mask", "per_example thresholds", "per_example per_layer", "per_example complex")
@pytest.mark.parametrize("mode", VMAPPED)
def test_torch_under_vmap(case, mode):
    got = VMAPPED[mode](lambda v: case(v[:9], v[9]).sum(), tensor([*X, 0.15]), tensor([*DX, DC]))
    np.testing.assert_allclose(got, 2 * case.change(0.15).sum(), rtol=1e-7)


def derivatives(case, x, c, dx, dc):
    """Return how the case changes along (dx, dc), and the gradients of its sum, by PyTorch."""
    return [FORWARD["func.jvp"](case, x, c, dx, dc), *torch.func.grad(lambda x, c: case(x, c).sum(), (0, 1))(x, c)]


def narrow_cases():
    """Yield frameworks, dtypes and cases; in JAX, which compiles each operation, a case has one of the half types."""
    for place, name in enumerate((*FEW, "per_example mask")):
        dtypes = ("float32", "bfloat16", "float16")
        for framework, some in (("torch", dtypes), ("jax", (dtypes[0], dtypes[1 + place % 2]))):
            yield from (
                pytest.param(CASE_OF[name], dtype, framework, id=f"{framework}-{dtype}-{name}") for dtype in some
            )


@pytest.mark.parametrize(("case", "dtype", "framework"), list(narrow_cases()))
def test_narrow_dtypes_have_the_derivative_of_float64(case, dtype, framework):
    tolerance = 8 * float(jnp.finfo(dtype).eps)
    narrow = [tensor(a, getattr(torch, dtype)) for a in (X, 0.15, DX, DC)]
    want = derivatives(case, *(a.double() for a in narrow))
    if framework == "torch":
        got = [a.double() for a in derivatives(case, *narrow)]
    else:
        x, c, dx, dc = (jnp.array(a.double().numpy(), dtype) for a in narrow)
        change = jax.jvp(case, (x, c), (dx, dc))[1]
        got = [change, *jax.grad(lambda x, c: case(x, c).sum(), (0, 1))(x, c)]
    for g, w in zip(got, want, strict=True):
        g, w = (np.asarray(a, np.float64) for a in (g, w))
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * np.abs(w).max())


@every_case
def test_at_zero_every_derivative_is_finite(case):
    zero, c = tensor(np.zeros(9)), tensor(0.15)
    changes = FORWARD["func.jvp"](case, zero, c, tensor(DX), tensor(DC))
    gradients = torch.func.grad(lambda x, c: case(x, c).sum(), (0, 1))(zero, c)
    assert all(torch.isfinite(g).all() for g in (changes, *gradients))
    with jax.enable_x64(True):
        args = jnp.zeros(9), jnp.array(0.15)
        changes = jax.jvp(case, args, (jnp.array(DX), jnp.array(DC)))[1]
        gradients = jax.grad(lambda x, c: case(x, c).sum(), (0, 1))(*args)
    assert all(np.isfinite(g).all() for g in (changes, *gradients))


def test_a_threshold_below_zero_counts_as_zero():
    """One whose value is not known, that is; others are an error."""
    clip = lambda x, c: gradclip.clip_by_global_norm(x, c)[0].sum()
    gx, gc = torch.func.vmap(torch.func.grad(clip, (0, 1)), (None, 0))(tensor(X), tensor([-1.0, -0.5]))
    assert not gx.any()
    assert not gc.any()


def test_a_triangle_by_hand():
    """(3, 4, 1) clipped to 1 along (1, -2, 0.5), and the rows (3, 4), (0.3, 0.4), worked out by hand."""
    x = torch.tensor([3.0, 4.0, 1.0])
    clip = lambda x: gradclip.clip_by_global_norm(x, 1.0)[0]
    got = torch.func.jvp(clip, (x,), (torch.tensor([1.0, -2.0, 0.5]),))[1]
    np.testing.assert_allclose(got, [39.5 / 26**1.5, -34 / 26**1.5, 17.5 / 26**1.5], rtol=1e-5)
    batch = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    got = torch.func.grad(lambda g: gradclip.per_example_clip(g, 1.0)[0][0])(batch)
    np.testing.assert_allclose(got, [[0.128, -0.096], [1.0, 0.0]], rtol=1e-5)

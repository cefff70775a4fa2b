"""The derivative of what does not count, or is no real number: zero."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own first jvp
ROWS = [[3.0, 4.0], [np.nan, 1.0], [0.3, 0.4], [np.inf, -np.inf], [6.0, 8.0]]
EXCLUDED = {
    "drop": ({}, [0, 2, 4]),
    "mask": ({"mask": np.array([True, False, True, False, False])}, [0, 2]),
    "mask under propagate": ({"mask": np.array([True, False, True, False, False]), "nonfinite": "propagate"}, [0, 2]),
    "zero": ({"nonfinite": "zero"}, [0, 1, 2, 3, 4]),
}


@pytest.mark.parametrize("how", EXCLUDED)
@pytest.mark.parametrize("rule", ["clip", "normalize", "automatic"])
@pytest.mark.parametrize("framework", ["torch", "jax", "jax-jit"])
def test_what_is_left_out_has_the_derivative_zero(how, rule, framework):
    options, kept = EXCLUDED[how]

    def total(rows, c):
        summed, info = gradclip.per_example_clip(rows, c, rule=rule, **options)
        return summed[0] + 0.5 * summed[1] + (info.norms[np.array(kept)]).sum()

    def alone(rows, c):
        summed, info = gradclip.per_example_clip(rows, c, rule=rule)
        return summed[0] + 0.5 * summed[1] + info.norms.sum()

    finite = np.nan_to_num(ROWS, nan=0.0, posinf=0.0, neginf=0.0)[kept]
    want = torch.func.grad(alone, argnums=(0, 1))(torch.tensor(finite), torch.tensor(1.0, dtype=torch.float64))
    module = torch.func if framework == "torch" else jax

    def derivatives(rows, c, *ones):
        return module.grad(total, argnums=(0, 1))(rows, c), module.jvp(total, (rows, c), ones)[1]

    given = np.array(ROWS), np.array(1.0), np.ones((5, 2)), np.array(1.0)
    if framework == "torch":
        got, change = derivatives(*map(torch.from_numpy, given))
    else:
        with jax.enable_x64(True):
            got, change = (jax.jit(derivatives) if framework == "jax-jit" else derivatives)(*map(jnp.asarray, given))
    known = np.isfinite(np.array(ROWS))[kept]
    expected = np.zeros((5, 2))
    expected[kept] = np.where(known, want[0], 0.0)
    np.testing.assert_allclose(got[0], expected, rtol=1e-12)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-12)
    np.testing.assert_allclose(change, expected.sum() + float(want[1]), rtol=1e-12)


@pytest.mark.parametrize("through", ["func", "autograd", "jax"])
def test_left_out_elements_of_a_clipped_tree(through):
    """Under "zero" the rest, (3, 4), has the derivative of a tree of its own; under "drop" there is none."""
    values = [3.0, np.nan, 4.0, np.inf]
    for policy, want in {"zero": [0.128, 0.0, -0.096, 0.0], "drop": [0.0] * 4}.items():
        first = lambda x, policy=policy: gradclip.clip_by_global_norm(x, 1.0, nonfinite=policy)[0][0]
        if through == "jax":
            got = jax.grad(first)(jnp.array(values))
        elif through == "func":
            got = torch.func.grad(first)(torch.tensor(values))
        else:
            x = torch.tensor(values, requires_grad=True)
            got = torch.autograd.grad(first(x), x)[0]
        np.testing.assert_allclose(got, want, rtol=1e-5)


def test_sums_on_a_grid_have_no_derivative():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]], requires_grad=True)
    summed, info = gradclip.per_example_clip(rows, 1.0, grid=1000)
    assert summed.dtype is torch.int64
    assert not summed.requires_grad
    assert torch.autograd.grad(info.norms.sum(), rows)[0].allclose(torch.tensor([[0.6, 0.8], [0.6, 0.8]]))
    loss = lambda rows: gradclip.per_example_clip(rows, 1.0, grid=1000)[0].sum() * 1e-3
    assert not torch.func.grad(loss)(rows.detach()).any()
    assert not torch.func.jvp(loss, (rows.detach(),), (torch.ones(2, 2),))[1].any()
    with jax.enable_x64(True):
        assert not jax.grad(loss)(jnp.array(ROWS[:1])).any()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_gradients_of_sums_and_thresholds():
    clip = torch.compile(lambda g, c: gradclip.per_example_clip(g, c)[0][0], backend="eager", fullgraph=True)
    rows, c = torch.tensor([[3.0, 4.0], [0.3, 0.4]], requires_grad=True), torch.tensor(1.0, requires_grad=True)
    gx, gc = torch.autograd.grad(clip(rows, c), (rows, c))
    np.testing.assert_allclose(gx, [[0.128, -0.096], [1.0, 0.0]], rtol=1e-5)
    assert float(gc) == pytest.approx(0.6, rel=1e-6)

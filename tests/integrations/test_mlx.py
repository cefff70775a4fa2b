"""MLX's `clip_grad_norm` on gradclip's engine, beside MLX's own, and in a loop as mlx-lm's."""

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn, optimizers
from mlx.optimizers import clip_grad_norm as theirs
from mlx.utils import tree_flatten

import gradclip
from frameworks import from_mlx
from gradclip.integrations.mlx import clip_grad_norm
from rational import at_most


def numbers(tree):
    return [from_mlx(leaf) for _, leaf in tree_flatten(tree)]


def tree(dtype=mx.float32, *shapes):
    mx.random.seed(1)
    rest = [mx.random.normal(shape).astype(dtype) for shape in shapes]
    return {"w": [mx.random.normal((3, 4)).astype(dtype), {"b": mx.random.normal((5,)).astype(dtype)}, *rest]}


@pytest.mark.parametrize("transform", [lambda f: f, mx.compile], ids=["eager", "compiled"])
@pytest.mark.parametrize("threshold", [0.5, 100.0])
def test_beside_that_of_mlx(transform, threshold):
    large = (), (0,), (1, 17), (3, 257), (15,)
    halves = tree(mx.float16), tree(mx.bfloat16)
    for given in (tree(), tree(mx.float32, *large), *halves, {"w": mx.array([2, 3]), "b": mx.array([1])}):
        (mine, norm), (other, other_norm) = (transform(f)(given, threshold) for f in (clip_grad_norm, theirs))
        rtol = {mx.float16: 2e-3, mx.bfloat16: 2e-2}.get(given["w"][0].dtype, 1e-5)
        exact = np.linalg.norm(np.concatenate([x.reshape(-1).astype(float) for x in numbers(given)]))
        assert norm.item() == pytest.approx(exact, rel=1e-6)
        assert norm.item() == pytest.approx(other_norm.item(), rel=rtol)
        for x, y in zip(numbers(mine), numbers(other), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_allclose(x.astype(float), y.astype(float), rtol=rtol)
        assert at_most(numbers(mine), 2, threshold)


def test_where_that_of_mlx_is_wrong():
    big, small, many = {"w": mx.full((4,), 1e20)}, {"w": mx.full((4,), 1e-30)}, {"w": mx.ones(3000, mx.bfloat16)}
    assert theirs(big, 1.0)[0]["w"].tolist() == [0.0] * 4
    np.testing.assert_allclose(clip_grad_norm(big, 1.0)[0]["w"], [0.5] * 4, rtol=1e-6)
    assert theirs(small, 1e-30)[0]["w"].tolist() == [0.0] * 4
    np.testing.assert_allclose(clip_grad_norm(small, 1e-30)[0]["w"], [5e-31] * 4, rtol=1e-6)
    assert theirs(many, 1.0)[1].item() == 54.75
    assert clip_grad_norm(many, 1.0)[1].item() == pytest.approx(3000**0.5, rel=1e-7)


def test_what_holds_no_numbers():
    for given in ({}, [], {"w": None}):
        clipped, norm = clip_grad_norm(given, 1.0)
        assert clipped == given
        assert (norm.item(), norm.dtype) == (0.0, mx.float32)
    with pytest.raises(ValueError, match="max_norm must not be negative or NaN"):
        clip_grad_norm(tree(), -1.0)


def test_a_module_is_not_its_gradients():
    for call in (clip_grad_norm, gradclip.clip_by_global_norm):
        with pytest.raises(TypeError, match=r"For a module, pass the gradients that mlx\.nn\.value_and_grad"):
            call(nn.Linear(2, 2), 1.0)


def test_a_compiled_training_step():
    mx.random.seed(0)
    model, x, y = nn.Linear(4, 1), mx.random.normal((8, 4)), mx.random.normal((8, 1)) * 100
    optimizer = optimizers.SGD(learning_rate=1.0)
    loss_and_grad = nn.value_and_grad(model, lambda model, x, y: nn.losses.mse_loss(model(x), y))
    state = [model.state, optimizer.state]

    def step(x, y):
        loss, grads = loss_and_grad(model, x, y)
        grads, norm = clip_grad_norm(grads, 0.25)
        optimizer.update(model, grads)
        return loss, norm

    compiled = mx.compile(step, inputs=state, outputs=state)
    losses = []
    for _ in range(5):
        before = numbers(model.parameters())
        loss, norm = compiled(x, y)
        mx.eval(state)
        moved = [new - old for new, old in zip(numbers(model.parameters()), before, strict=True)]
        assert np.sqrt(sum(np.sum(part.astype(float) ** 2) for part in moved)) == pytest.approx(0.25, rel=1e-4)
        assert norm.item() > 1
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)

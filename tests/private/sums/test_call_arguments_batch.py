"""Which arguments carry the batch has to be said where several may: a label for all examples moves them all."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip

X, Y = np.float32([[3.0, 4.0], [0.25, 0.5], [1.0, 0.0]]), np.float32([1.0, -2.0, 5.0])
MAKERS = {"jax": jnp.asarray, "torch": torch.as_tensor}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def loss(w, x, y):
    return ((x @ w - y) ** 2).sum()


class Loss:
    def __call__(self, w, x, y):
        return loss(w, x, y)

    def method(self, w, x, y):
        return loss(w, x, y)


def with_default(w, x, y=None):
    return (x @ w).sum() if y is None else loss(w, x, y)


@pytest.mark.parametrize(
    ("fun", "settings", "said"),
    [
        (loss, {}, r"\(1, 2\)"),
        (lambda w, x, y: loss(w, x, y), {}, r"\(1, 2\)"),
        (Loss(), {}, r"\(1, 2\)"),
        (Loss().method, {}, r"\(1, 2\)"),
        (functools.partial(loss), {}, r"\(1, 2\)"),
        (lambda w, x, y, z: loss(w, x, y), {}, r"\(1, 2, 3\)"),
        (lambda w, x, y, key: loss(w, x, y), {"prng_argnum": 3}, r"\(1, 2\)"),
        (lambda w, x, y: (loss(w, x, y), x), {"has_aux": True}, r"\(1, 2\)"),
        (lambda x, y, w: loss(w, x, y), {"argnums": 2}, r"\(0, 1\)"),
        (jax.jit(loss), {}, r"\(1, 2\)"),
    ],
)
def test_several_arguments_and_no_word_which_carry_the_batch(fun, settings, said):
    with pytest.raises(TypeError, match=rf"positions {said}\. Tell clipped_grad which ones do: batch_argnums={said}"):
        gradclip.clipped_grad(fun, 1.0, **settings)


def test_of_any_function_likewise():
    with pytest.raises(TypeError, match=r"Tell clipped_fun which ones do: batch_argnums=\(0, 1\)"):
        gradclip.clipped_fun(lambda x, y: x + y, 1.0)
    summed = gradclip.clipped_fun(lambda x, y: x * y, 9.0, batch_argnums=(0, 1))
    assert summed(jnp.ones((3, 2)), jnp.asarray([1.0, 2.0, 3.0])).tolist() == [[6.0, 6.0]]
    assert gradclip.clipped_fun(lambda x: x, 9.0)(jnp.ones((3, 2))).tolist() == [[3.0, 3.0]]


@pytest.mark.parametrize("fun", [lambda *args: loss(*args), with_default], ids=["*args", "default"])
def test_what_the_function_does_not_tell_is_seen_when_it_is_called(fun, make):
    clipped = gradclip.clipped_grad(fun, 1.0)
    with pytest.raises(TypeError, match=r"batch_argnums=\(1, 2\) if all do"):
        clipped(make(np.zeros(2, np.float32)), make(X), make(Y))


@pytest.mark.parametrize("fun", [with_default, lambda w, x, *, y: loss(w, x, y)], ids=["default", "keyword-only"])
def test_labels_by_keyword_would_all_go_to_every_example(fun, make):
    clipped = gradclip.clipped_grad(fun, 1.0)
    with pytest.raises(TypeError, match="every example would get all of y, which has 3 rows like the batch"):
        clipped(make(np.zeros(2, np.float32)), make(X), y=make(Y))
    whole = gradclip.clipped_grad(fun, 1e9, batch_argnums=1)(make(np.zeros(2, np.float32)), make(X), y=make(Y))
    assert whole.tolist() == [-2 * 4.0 * 4.25, -2 * 4.0 * 4.5]


def test_one_argument_needs_no_word(make):
    ones = make(np.ones(2, np.float32))
    for fun in (
        lambda w, x: (x * w).sum(),
        lambda w, x, scale=1.0: (x * w).sum() * scale,
        lambda w, x, *rest: (x * w).sum(),
        functools.partial(lambda w, x, scale: (x * w).sum() * scale, scale=1.0),
        lambda w, batch, *, scale=1.0: (batch * w).sum() * scale,
    ):
        assert gradclip.clipped_grad(fun, 10.0)(ones, make(X)).tolist() == [4.25, 4.5]
    assert gradclip.clipped_grad(lambda w, x, *, scale: scale * (x * w).sum(), 10.0)(
        ones, make(X), scale=2
    ).tolist() == [
        8.5,
        9.0,
    ]
    keyed = gradclip.clipped_grad(lambda w, x, key: (x * w).sum(), 10.0, prng_argnum=2)
    assert keyed(jnp.ones(2), jnp.asarray(X), jax.random.key(0)).tolist() == [4.25, 4.5]


def test_one_label_moves_the_sum_by_no_more_than_promised(make):
    """With all labels for every example one label moved all three."""
    clipped = gradclip.clipped_grad(loss, 1.0, batch_argnums=(1, 2), pad_to=3)
    w = make(np.float32([0.5, -1.0]))
    other = Y.copy()
    other[2] = -1e4
    one, two = (np.float64(np.asarray(clipped(w, make(X), make(y)))) for y in (Y, other))
    assert np.linalg.norm(one - two) <= clipped.sensitivity("replace_one").total

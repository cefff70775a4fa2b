"""What `explain_spike` says of a loss or a batch that it cannot explain: what to write instead."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gradclip

X = np.array([[3.0, 4.0], [0.6, 0.8], [30.0, 40.0]], np.float32)
LABELS = np.array([0, 1, 1])
MAKERS = {"jax": jnp.asarray, "torch": torch.tensor, "tensorflow": tf.constant}
SCALES = {"jax": jnp.sum, "torch": torch.sum, "tensorflow": tf.reduce_sum}


def scores(params, x):
    return x @ params["w"]


def by_item(params, x, labels):
    return torch.tensor(cross_entropy(scores(params, x), labels).item())


def as_float(params, x, labels):
    return cross_entropy(scores(params, x), labels).item()


def branching(params, x, labels):
    value = cross_entropy(scores(params, x), labels)
    return value if value > 1 else 2 * value


def vector(params, x, labels):
    return cross_entropy(scores(params, x), labels, reduction="none")


def right(params, x, labels):
    return cross_entropy(scores(params, x), labels)


def explained(loss, batch, **settings):
    """Explain a batch in PyTorch, and see that the parameters stay as they are."""
    params = {"w": torch.ones(2, 2, requires_grad=True)}
    version = params["w"]._version
    try:
        return gradclip.explain_spike(loss, params, batch=batch, **settings)
    finally:
        assert (params["w"].tolist(), params["w"].grad, params["w"]._version) == ([[1.0, 1.0]] * 2, None, version)


BATCH = torch.tensor(X), torch.tensor(LABELS)


@pytest.mark.after_error
@pytest.mark.parametrize("method", ["materialize", "loop"])
@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (vector, r"one number for each example, got an array of shape \(1,\)\. .* With reduction='none' a loss"),
        (as_float, r"got a float, which has no gradient\. Return the tensor, without \.item\(\)"),
        (lambda *args: (right(*args), scores(*args[:2])), r"got a tuple of 2\. .* pass has_aux=True"),
        (lambda *args: {"loss": right(*args)}, r"got a dict with the keys loss\. Return the one that is the loss"),
        (lambda *args: None, r"got None\. Return the loss"),
    ],
)
def test_a_loss_that_is_not_one_number(loss, said, method):
    with pytest.raises(ValueError, match=said):
        explained(loss, BATCH, method=method)


@pytest.mark.parametrize("loss", [by_item, lambda *args: right(*args).detach() if right(*args) > 0 else None])
def test_a_loss_that_was_read_out_of_its_tensor(loss):
    with pytest.raises(RuntimeError, match=r"its loss depends on no parameter: return the loss without \.item\(\)"):
        explained(loss, BATCH)


def test_a_branch_on_values_needs_the_loop():
    with pytest.raises(RuntimeError, match=r'For one example it works: pass method="loop"'):
        explained(branching, BATCH)
    assert len(explained(branching, BATCH, method="loop").examples) == 3


@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
@pytest.mark.parametrize("read", [float, np.asarray, lambda value: value if value > 0 else -value])
def test_a_loss_that_reads_values_while_it_is_traced(framework, read):
    make, total = MAKERS[framework], SCALES[framework]
    with pytest.raises((TypeError, AttributeError, NotImplementedError)) as raised:
        gradclip.explain_spike(lambda w, x: read(total(w * x)), make(np.ones(2, np.float32)), batch=make(X))
    instead = {"jax": "jnp.where or jax.lax.cond", "tensorflow": 'Or pass method="loop"'}
    assert instead[framework] in raised.value.__notes__[0]


def test_auto_says_the_same_of_values():
    with pytest.raises(TypeError) as raised:
        gradclip.clipped_grad(lambda w, x: jnp.sum(w * x).item(), 1.0)(jnp.ones(2), jnp.asarray(X))
    assert "Return the array without .item()" in raised.value.__notes__[0]


def test_errors_of_a_loss_that_reads_nothing_have_no_note():
    def loss(w, x):
        raise TypeError("my own")

    for make in (MAKERS["jax"], MAKERS["tensorflow"]):
        with pytest.raises(TypeError, match="my own") as raised:
            gradclip.explain_spike(loss, make(np.ones(2, np.float32)), batch=make(X))
        assert not any("gradclip" in note for note in getattr(raised.value, "__notes__", ()))


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("batch", "error", "said"),
    [
        (DataLoader(TensorDataset(*BATCH)), ValueError, r"argument 1 is .*DataLoader, not an array .*next\(iter\(load"),
        (iter([BATCH]), ValueError, r"argument 1 is .* list_iterator, not an array .*pass the arrays of one batch"),
        (TensorDataset(*BATCH), ValueError, r"argument 1 is .* TensorDataset, not an array"),
        ((BATCH[0], ["a", "b", "c"]), ValueError, r"argument 2\[0\] is 'a' of type str.* Leave text out"),
        ((BATCH[0], LABELS.tolist()), ValueError, r"argument 2\[0\] is 0 of type int.* as one array"),
        ((BATCH[0], print), ValueError, r"argument 2 is .*builtin_function_or_method.* Pass arrays of shape \(batch,"),
        ((BATCH[0], BATCH[1][:2]), ValueError, r"argument 1 \(3, 2\), argument 2 \(2,\)\. Give each a row for each ex"),
        (None, TypeError, r"the batch, a NoneType that counts as one argument: missing .*'labels'"),
        ({"x": BATCH[0], "y": BATCH[1]}, TypeError, r"a dict with the keys x, y that counts as one argument: missing"),
        (BATCH[0], TypeError, r"a Tensor that counts as one argument.*Write it as loss\(params, x, y\)"),
        (list(zip(*BATCH, strict=True)), TypeError, r"a list of 3 arguments: too many positional arguments"),
    ],
)
def test_a_batch_that_is_none(batch, error, said):
    with pytest.raises(error, match=said):
        explained(right, batch)


def test_a_module_is_no_loss_of_parameters():
    with pytest.raises(TypeError, match=r"the loss does not take the parameters and the batch, a tuple of 2 arguments"):
        explained(torch.nn.CrossEntropyLoss(), BATCH)


def test_gradients_that_are_all_zero_are_pointed_out():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's loop warns of a parameter that is not used
        found = explained(by_item, BATCH, method="loop")
    assert str(found).splitlines()[1].startswith("  All gradients are 0. If that is wrong: does the loss use the para")
    assert "All gradients" not in str(explained(right, BATCH))

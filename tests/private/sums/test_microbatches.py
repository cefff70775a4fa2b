"""Microbatches whose size follows from the bytes of gradients, and from nothing that one example can change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch

import gradclip
from gradclip._src.private.sums.microbatches import Memory, as_microbatch_size, bytes_of, examples_in

MADE = {"method": "materialize"}


def loss(w, x):
    return (w * x).sum()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("auto", 2**28), ("256 MiB", 2**28), ("1GiB", 2**30), ("1.5 KiB", 1536), (" 8 MiB ", 2**23)],
)
def test_bytes_are_read_from_text(text, expected):
    assert as_microbatch_size(text, sized=True) == Memory(expected)
    assert as_microbatch_size(Memory(expected), sized=True) == Memory(expected)


@pytest.mark.parametrize("bad", ["Auto", "8", "8 MB", "0 MiB", "-1 MiB", "1e3 MiB", "", "MiB", "0.0001 KiB"])
def test_other_texts_are_named(bad):
    with pytest.raises(TypeError, match=rf"a whole number, 1 or more, 'auto', or the bytes .*, got '{bad}'\."):
        gradclip.clipped_grad(loss, 1.0, microbatch_size=bad)


def test_results_of_functions_have_no_size_before_they_are_called():
    with pytest.raises(ValueError, match=r"microbatch_size must be a number of examples, got 'auto'"):
        gradclip.clipped_fun(lambda x: x, 1.0, microbatch_size="auto")


@pytest.mark.parametrize(
    ("one", "memory", "pad_to", "expected"),
    [
        (100, 1000, None, 8),  # ten fit
        (100, 799, None, 7),
        (100, 800, None, 8),
        (100, 1699, None, 16),
        (100, 99, None, 1),  # not even one fits
        (100, 10**9, None, 256),
        (0, 1000, None, 256),  # no parameters
        (100, 10**9, 20, 24),  # one program of 24 rows, as pad_to=20 alone has it
        (100, 10**9, 1, 1),
        (100, 2500, 40, 24),  # two of 24, not one of 24 and a rest
        (100, 3300, 40, 24),  # 32 fit; two equal ones need 24 rows each, not 32
        (100, 500, 40, 5),
        (100, 800, 1000, 8),
    ],
)
def test_the_most_examples_that_fit(one, memory, pad_to, expected):
    parameters = np.zeros(one, np.int8)
    found = examples_in(Memory(memory), parameters, pad_to)
    assert found == expected
    assert found == 1 or found * one <= memory


def test_bytes_of_every_framework():
    for zeros in (np.zeros((3, 5), np.float64), jnp.zeros((6, 5)), torch.zeros(2, 15), tf.zeros([10, 3])):
        assert bytes_of({"a": zeros, "b": [zeros]}) == 240
    assert bytes_of(tf.Variable(tf.zeros(7))) == 28
    assert bytes_of([jnp.zeros(3, jnp.bfloat16), torch.zeros(2, dtype=torch.float16)]) == 10
    assert bytes_of({"a": 1.0}) == 8
    assert bytes_of(jax.ShapeDtypeStruct((4, 2), jnp.float32)) == 32


@pytest.mark.parametrize("make", [jnp.asarray, torch.tensor, tf.constant], ids=["jax", "torch", "tensorflow"])
def test_the_size_is_that_of_the_parameters(make, monkeypatch):
    seen = []
    total = tf.reduce_sum if make is tf.constant else lambda x: x.sum()
    sizes = gradclip._src.private.functions.clipped.examples_in
    monkeypatch.setattr(
        "gradclip._src.private.functions.clipped.examples_in", lambda *args: seen.append(sizes(*args)) or seen[-1]
    )
    rows = np.random.default_rng(0).normal(size=(19, 32)).astype(np.float32)
    clipped = gradclip.clipped_grad(lambda w, x: total(w * x), 1.0, microbatch_size="1 KiB")
    whole = gradclip.clipped_grad(lambda w, x: total(w * x), 1.0)(make(np.zeros(32, np.float32)), make(rows))
    for count in (1, 7, 8, 19):  # 8 gradients of 128 bytes, whatever the batch
        clipped(make(np.zeros(32, np.float32)), make(rows[:count]))
    found = clipped(make(np.zeros(32, np.float32)), make(rows))
    assert set(seen) == {8}
    np.testing.assert_allclose(np.asarray(found), np.asarray(whole), rtol=1e-6)
    clipped(make(np.zeros(3, np.float32)), make(rows[:, :3]))  # 12 bytes each: 85 fit, of them 80
    assert seen[-1] == 80


def test_another_size_of_parameters_gets_a_program_of_its_own():
    """A compiled loop keeps its size: it must not serve gradients that are eight times as large."""
    shapes = []

    def loss(w, x):
        shapes.append(w.size)
        return jnp.sum(w * x)

    clipped = gradclip.clipped_grad(loss, 1.0, microbatch_size="1 KiB", return_norms=True)
    for size in (16, 128):
        rows = jnp.ones((40, size))
        summed, outputs = clipped(jnp.zeros(size), rows)
        np.testing.assert_allclose(summed, 40 / np.sqrt(size), rtol=1e-5)
        assert outputs.norms.shape == (40,)
        calls = len(shapes)
        clipped(jnp.zeros(size), rows)
        assert len(shapes) == calls  # not traced again
    assert {16, 128} == set(shapes)


def test_a_promise_before_the_first_call_counts_the_most_microbatches():
    size = 2**15
    clipped = gradclip.clipped_grad(loss, 1.0, microbatch_size="1 MiB", pad_to=64, method="materialize")
    before = clipped.sensitivity(layout=gradclip.SumLayout(elements=size))
    alone = gradclip.clipped_grad(loss, 1.0, microbatch_size=1, pad_to=64, method="materialize").sensitivity(
        layout=gradclip.SumLayout(elements=size)
    )
    assert (before.bound, before.rounding) == (alone.bound, alone.rounding)
    assert before.keeps_places
    assert before.note == "microbatches of up to 1 MiB of examples that keep their places, where mask= removes one"
    clipped(jnp.zeros(size), jnp.ones((64, size)))
    known = gradclip.clipped_grad(loss, 1.0, microbatch_size=8, pad_to=64, method="materialize").sensitivity(
        layout=gradclip.SumLayout(elements=size)
    )
    assert clipped.sensitivity().rounding == known.rounding < before.rounding
    never_called = dataclasses.replace(clipped)
    assert never_called.sensitivity(layout=gradclip.SumLayout(elements=size)).rounding == before.rounding


@pytest.mark.parametrize("make", [jnp.asarray, torch.tensor], ids=["jax", "torch"])
def test_what_is_promised_holds(make):
    rows = make(np.random.default_rng(1).normal(size=(7, 40)).astype(np.float32))
    clipped = gradclip.clipped_grad(loss, 1.0, microbatch_size="1 KiB", pad_to=7)
    clipped(make(np.zeros(40, np.float32)), rows)
    report = gradclip.check_sensitivity(clipped, rows, sensitivity=clipped.sensitivity(), trials=1)
    assert report.holds, report

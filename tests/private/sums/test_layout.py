import dataclasses
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip import SumLayout


def test_a_layout_holds_plain_numbers_and_names():
    layout = SumLayout(partial_sums=np.int8(8), partial_sums_in=torch.bfloat16, elements=torch.tensor(5))
    assert repr(layout) == (
        "SumLayout(partial_sums=8, partial_sums_in='bfloat16', microbatches=None, summed_in='float64', elements=5)"
    )
    assert layout == SumLayout(partial_sums=8, partial_sums_in=jnp.bfloat16, elements=5)
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert dataclasses.replace(layout, partial_sums=2).elements == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.elements = 6


def test_complex_elements_are_two_numbers():
    assert SumLayout(elements=[np.ones((2, 3)), {"a": np.ones(5, np.complex64)}]).elements == 16


@pytest.mark.parametrize("elements", ["many", ["many"], b"1", {"w": 3}, object()])
def test_elements_are_a_number_or_arrays(elements):
    with pytest.raises(TypeError, match="elements must be a number of elements or a tree of arrays, such as the param"):
        SumLayout(elements=elements)


@pytest.mark.parametrize("elements", [np.array(2.5), np.float32(3), True])
def test_elements_are_one_or_more(elements):
    with pytest.raises(ValueError, match="elements must be a whole number, 1 or more"):
        SumLayout(elements=elements)


@pytest.mark.parametrize("elements", [{}, [], np.ones(0), {"w": np.ones((0, 3)), "b": None}])
def test_a_tree_without_elements_is_refused(elements):
    with pytest.raises(ValueError, match=r"elements is a tree without elements\. Pass all parameters, or their number"):
        SumLayout(elements=elements)


def test_arguments_go_by_name():
    with pytest.raises(TypeError):
        SumLayout(8)
    with pytest.raises(TypeError, match="partial_sums must be a constant, got a traced array"):
        jax.jit(lambda n: SumLayout(partial_sums=n).partial_sums)(2)


@pytest.mark.parametrize("layout", [8, "float32", {"partial_sums": 8}, SumLayout])
def test_a_layout_is_no_number_and_no_dict(layout):
    clipped = gradclip.clipped_grad(lambda w, x: (w * x).sum(), 1.0, pad_to=8)
    for call in (clipped.sensitivity, lambda **given: gradclip.clipped_sum_sensitivity(1.0, **given)):
        with pytest.raises(
            TypeError, match=r"layout must be a gradclip.SumLayout, such as SumLayout\(partial_sums=8\)"
        ):
            call(layout=layout)


@pytest.mark.parametrize("word", [*inspect.signature(SumLayout).parameters])
def test_its_words_outside_of_it_are_advised(word):
    clipped = gradclip.clipped_grad(lambda w, x: (w * x).sum(), 1.0, pad_to=8)
    for call in (clipped.sensitivity, lambda **given: gradclip.clipped_sum_sensitivity(1.0, **given)):
        with pytest.raises(TypeError, match=rf"Pass layout=gradclip\.SumLayout\({word}=\.\.\.\) instead"):
            call(**{word: 2})


def test_a_clipped_function_fills_in_what_a_layout_leaves_open():
    clipped = gradclip.clipped_grad(lambda w, x: (w * x).sum(), 1.0, microbatch_size=2, pad_to=8, method="materialize")
    one, four = (clipped.sensitivity("zero_out", layout=SumLayout(microbatches=n)).rounding for n in (1, 4))
    assert one < clipped.sensitivity("zero_out").rounding == four

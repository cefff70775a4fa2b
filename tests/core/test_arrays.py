"""What is known of arrays together, and dtypes that no gradient has."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import gradclip
from gradclip._src.core.arrays import Arrays, check_dtypes, checked_dtype
from gradclip._src.core.formats import BFLOAT16, FLOAT32
from gradclip._src.core.layouts import EXAMPLE, TREE


def test_dtypes_and_formats_are_those_of_all():
    arrays = Arrays([np.ones(2, np.complex64), np.ones((3, 1), ml_dtypes.bfloat16)])
    assert arrays.dtypes == {"complex64", "bfloat16"}
    assert arrays.formats == {FLOAT32, BFLOAT16}
    assert arrays.any_complex
    assert not arrays.only_halves
    assert Arrays(arrays[1:]).only_halves


def test_elements_are_counted_for_a_norm():
    arrays = Arrays([np.ones((4, 3)), np.ones((4, 2, 5)), np.ones(4)])
    assert arrays.elements() == arrays.sharing(TREE) == 56
    assert arrays.sharing(EXAMPLE) == 14
    assert len(arrays) == len(list(arrays)) == 3


def test_no_arrays_are_halves_of_no_elements():
    nothing = Arrays([])
    assert (nothing.elements(), nothing.any_complex, nothing.only_halves) == (0, False, True)


def test_the_first_dtype_that_cannot_be_clipped_is_named():
    good, bad = np.ones(1), np.ones(1, int)
    assert checked_dtype(good) is good
    with pytest.raises(TypeError, match=r"b has dtype int64, which cannot be clipped\. Convert it to one of float16"):
        check_dtypes([good, bad, bad], lambda: ["a", "b", "c"])
    with pytest.raises(TypeError, match="a gradient has dtype int64"):
        checked_dtype(bad)


def test_a_key_is_no_number_to_convert():
    with pytest.raises(
        TypeError, match=r"has dtype key<fry>, .*It is a key for random numbers, not a gradient: leave it"
    ):
        gradclip.global_norm({"w": jnp.ones(2), "key": jax.random.key(0)})

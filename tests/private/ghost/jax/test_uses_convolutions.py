"""Convolutions: their outer products sum to the gradients of `jax.vmap(jax.grad)`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapped_losses import agrees, normal, places, rows, run, scored, uses


@pytest.fixture(autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


CONVOLUTIONS = {
    "plain": ((1, 8, 8, 3), (3, 3, 3, 4), {}),
    "strides": ((1, 9, 8, 3), (3, 2, 3, 4), {"window_strides": (2, 3)}),
    "same": ((1, 8, 8, 3), (3, 3, 3, 4), {"padding": "SAME"}),
    "cropped": ((1, 8, 8, 3), (2, 3, 3, 4), {"padding": [(-1, 2), (3, -2)]}),
    "dilated": ((1, 9, 9, 3), (2, 3, 3, 4), {"rhs_dilation": (3, 2)}),
    "transposed": ((1, 4, 5, 3), (3, 3, 3, 4), {"lhs_dilation": (2, 3), "padding": [(2, 1), (0, 3)]}),
    "groups": ((1, 6, 6, 6), (3, 3, 2, 9), {"feature_group_count": 3}),
    "depthwise": ((1, 6, 6, 6), (3, 3, 1, 6), {"feature_group_count": 6}),
    "several": ((2, 6, 5, 3), (3, 3, 3, 4), {"window_strides": (2, 1)}),
    "one position": ((1, 3, 3, 3), (3, 3, 3, 4), {}),
    "one element": ((1, 6, 6, 3), (1, 1, 3, 4), {}),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions(name):
    shape, kernel, settings = CONVOLUTIONS[name]
    settings = {"window_strides": (1, 1), "padding": "VALID", **settings}

    def convolved(w, x):
        return lax.conv_general_dilated(x, w, dimension_numbers=("NHWC", "HWIO", "NHWC"), **settings)

    def loss(w, x):
        return jnp.sin(convolved(w, x)).sum()

    w, x = normal(*kernel), rows(*shape)
    positions = jax.eval_shape(lambda w, x: convolved(w, x[0])[..., 0], w, x).size
    assert uses(loss, w, x) == [[("conv_general_dilated", positions)]]
    agrees(loss, w, x)


@pytest.mark.parametrize("numbers", [("NCHW", "OIHW", "NCHW"), ("NHWC", "OHWI", "NCHW"), ("CNWH", "IHWO", "HNCW")])
def test_convolutions_of_any_layout_and_views_of_the_kernel(numbers):
    def loss(w, x):
        kernel = w.reshape(4, 3, 2, 3).transpose(*("OIHW".index(axis) for axis in numbers[1]))
        x = x.transpose(*("NCHW".index(axis) for axis in numbers[0]))
        return jnp.sin(lax.conv_general_dilated(x, kernel, (1, 2), "SAME", dimension_numbers=numbers)).sum()

    w, x = normal(4, 18), rows(1, 3, 6, 5)
    assert uses(loss, w, x) == [[("conv_general_dilated", 18)]]
    assert places(loss, w, x)[0] == [(((0, 0), (4, 18)), (4, 18), (), (0,), (1,))]
    agrees(loss, w, x)


def test_convolutions_in_loops():
    def loss(p, x):
        def layer(x, w):
            return jnp.tanh(jnp.convolve(x, p["all"], "same") + jnp.convolve(x, w, "same")), None

        return lax.scan(layer, x, p["w"])[0].sum()

    p = {"all": normal(3), "w": normal(4, 3)}
    assert uses(loss, p, rows(6)) == ["rev", "rev"]

    def unturned(p, x):
        def layer(x, w):
            both = [lax.conv(x[None, None], k[None, None], (1,), "SAME")[0, 0] for k in (p["all"], w)]
            return jnp.tanh(sum(both)), None

        return lax.scan(layer, x, p["w"])[0].sum()

    assert uses(unturned, p, rows(6)) == [[("conv_general_dilated", 24)], [("conv_general_dilated", 6)]]
    agrees(unturned, p, rows(6))


def test_what_the_kernel_does_not_meet_stays_out_of_the_patches():
    """A NaN in the image is in the patches of the positions that see it, and in no others."""
    x = np.array(rows(1, 6, 6, 1))
    x[2, 0, 0, 0, 0] = np.nan

    def loss(w, x):
        return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")).sum()

    gradient = run(scored(loss), (None, 0), [True])(normal(3, 3, 1, 2), x).gradients[0]
    left = np.isnan(np.asarray(gradient[0].terms[0].left))
    assert left.sum(axis=(1, 2, 3)).tolist() == [0, 0, 1, 0, 0]

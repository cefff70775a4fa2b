"""Norms of traced arrays: numbers of any magnitude in one reading, and programs that are traced once for each shape."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip
import gradclip._src.backends.jax.host as jax_backend
from gradclip._src.backends.jax.kernels import JaxKernels
from gradclip._src.backends.jax.traced import JaxTraced


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    monkeypatch.setattr(jax_backend, "usable", lambda leaves: False)
    with jax.enable_x64(True):
        yield


SCALES = (1e-320, 1e-200, 1e-125, 1e-120, 1.0, 1e140, 1e145, 1e200, 1e307)
PAIRS = [(a, b) for a in SCALES for b in SCALES if a <= b]


def exact(numbers, ord):
    total = sum(Fraction(abs(x)) ** ord for x in numbers)
    return total if ord == 1 else Fraction(math.isqrt(int(total * 2**4000))) / 2**2000


@pytest.mark.parametrize("ord", [1, 2])
def test_float64_of_any_magnitude(ord):
    norm_of = jax.jit(lambda tree: gradclip.global_norm(tree, ord))
    for a, b in PAIRS:
        tree = [np.array([a, -b / 7]), np.array([b / 3]), np.zeros(2)]
        found = float(norm_of(list(map(jnp.asarray, tree))))
        wanted = exact(np.concatenate(tree).tolist(), ord)
        # XLA's CPU code reads subnormals as zero, which the norm allows for.
        assert abs(Fraction(found) - wanted) <= wanted * Fraction(1e-14) + 6 * Fraction(2.0**-1022), (a, b)


@pytest.mark.parametrize("ord", [1, 2])
@pytest.mark.parametrize("beside", [0.0, 1e-200, 1.0, 1e200])
def test_what_is_not_finite_shows_beside_any_magnitude(ord, beside):
    norm_of = jax.jit(lambda x: gradclip.global_norm(x, ord))
    assert math.isnan(norm_of(jnp.array([beside, math.nan])))
    assert norm_of(jnp.array([beside, -math.inf])) == math.inf
    assert norm_of(jnp.zeros(3)) == 0.0


def test_the_smallest_magnitude_shows_what_is_not_finite():
    norm_of = jax.jit(lambda x: gradclip.global_norm(x, -math.inf))
    assert norm_of(jnp.array([-3.0, 2.0])) == 2.0
    for number in (math.inf, -math.inf, math.nan):
        assert not math.isfinite(norm_of(jnp.array([2.0, number])))


def test_rows_of_any_magnitude():
    x = np.array([[3e-200, 4e-200], [3.0, 4.0], [3e200, 4e200], [0.0, 0.0], [1.0, math.nan]])
    norms = jax.jit(lambda x: gradclip.per_example_clip(x, 1.0)[1].norms)(jnp.asarray(x))
    np.testing.assert_allclose(norms, [5e-200, 5.0, 5e200, 0.0, math.nan], rtol=1e-14)
    mapped = jax.jit(jax.vmap(gradclip.global_norm))(jnp.asarray(x))
    np.testing.assert_allclose(mapped, norms, rtol=1e-14)


def test_backends_with_the_same_settings_are_equal():
    assert JaxTraced(visible=False) == JaxTraced(visible=False) != JaxTraced(visible=True)
    assert hash(JaxTraced(visible=False)) == hash(JaxTraced(visible=False))
    assert JaxTraced(visible=False) != JaxKernels(visible=False)
    assert JaxTraced(visible=False) != 3


def test_each_shape_is_traced_once():
    tree = [jnp.ones((3, 2), jnp.float32)] * 30
    text = jax.jit(lambda tree: gradclip.clip_by_global_norm(tree, 1.0)[0]).lower(tree).as_text()
    assert text.count("stablehlo.reduce") == 2  # of the shape, and of all sums

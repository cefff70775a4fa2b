"""Sums with noise: how much, on which integers, and what is refused."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.private.noise import discrete
from gradclip._src.private.noise.add import add_noise
from gradclip._src.private.sums.layout import SumLayout
from gradclip._src.private.sums.sensitivity import Sensitivity, clipped_sum_sensitivity

GRID = 2**20
FLOATS = clipped_sum_sensitivity(1.0, batch_size=8)
INTEGERS = clipped_sum_sensitivity(0.5, batch_size=8, grid=GRID)


@pytest.fixture
def asked(monkeypatch):
    """Replace all samplers: the noise is 1000, 1001, ... in order. Returns the scale and the integers of each."""
    calls = []

    def sampler(source, scale):
        integers = []
        calls.append((scale, integers))

        def counted_up(piece):
            noise = 1000 + len(integers) + np.arange(piece.size)
            integers.extend(piece.tolist())
            return piece + noise

        return counted_up

    monkeypatch.setattr(discrete, "sampler", sampler)
    monkeypatch.setattr(discrete, "processors", lambda: 1)
    return calls


def test_integers_of_a_grid_get_noise_and_stay_integers(asked):
    summed = {"w": np.array([[5, -7], [0, 1]]), "b": np.array([2**40])}
    found = add_noise(summed, INTEGERS, noise_multiplier=1.1, rng="system")
    assert found["b"].tolist() == [2**40 + 1000]
    assert found["w"].tolist() == [[1006, 995], [1003, 1005]]
    assert found["w"].dtype == found["b"].dtype == np.int64
    [(scale, integers)] = asked
    assert integers == [2**40, 5, -7, 0, 1]
    assert Fraction(scale) >= Fraction(1.1) * GRID
    assert summed["w"].tolist() == [[5, -7], [0, 1]]


def test_several_thresholds_share_the_noise_in_steps(asked):
    several = clipped_sum_sensitivity({"w": 3.0, "b": 4.0}, "replace_one", batch_size=8, grid=GRID)
    add_noise({"w": np.zeros(2, np.int64), "b": np.zeros(1, np.int64)}, several, noise_multiplier=2.0, rng="system")
    [(scale, _)] = asked
    # Each threshold has GRID steps; both move, by twice as much: 2 * 2 * GRID * sqrt(2).
    assert Fraction(scale) ** 2 >= 32 * GRID**2
    assert scale == pytest.approx(GRID * math.sqrt(32), rel=1e-15)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_floats_are_rounded_to_a_grid_first(asked, dtype):
    sensitivity = Sensitivity(1.0, "example", relation="add_or_remove_one", rounding=2.0**-30)
    # Four elements: sqrt(4) * s <= 2**-16 times the total, so s = 2**-17.
    summed = [np.array([0.5, -2.0], dtype), np.array([2.0**-18, 3 * 2.0**-18], dtype)]
    found = add_noise(summed, sensitivity, noise_multiplier=3.0, rng="system")
    [(scale, integers)] = asked
    assert integers == [2**16, -(2**18), 0, 2]
    total = Fraction(1) + Fraction(2) ** -30
    assert Fraction(scale) >= 3 * (total * 2**17 + 2)
    assert scale == pytest.approx(3 * (2**17 + 2), rel=1e-8)
    expected = np.array([2**16 + 1000, -(2**18) + 1001, 1002, 2 + 1003]) * 2.0**-17
    assert np.concatenate(found).tolist() == expected.astype(dtype).tolist()
    assert [x.dtype for x in found] == [dtype, dtype]


def test_the_step_depends_on_no_value(asked):
    for summed in (np.zeros(4), np.full(4, 1e30), np.array([np.nan, np.inf, -np.inf, 1e-300])):
        add_noise(summed, FLOATS, noise_multiplier=1.0, rng="system")
    assert len({scale for scale, _ in asked}) == 1
    assert asked[2][1] == [0, 2**62, -(2**62), 0]


def test_dtypes_may_be_mixed_and_counted_as_one_vector(asked):
    summed = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones((), dtype=torch.float64), "c": torch.ones(0)}
    found = add_noise(
        summed, Sensitivity(1.0, "example", relation="add_or_remove_one"), noise_multiplier=1.0, rng="system"
    )
    assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in summed.items()}
    assert found["a"].tolist() == (1 + (1000.0 + torch.arange(3)) * 2**-17).bfloat16().tolist()
    assert found["b"].item() == 1 + 1003 * 2.0**-17
    assert found["c"].shape == (0,)
    assert len(asked[0][1]) == 4


@pytest.mark.parametrize("summed", [{}, [], np.zeros((0, 3), np.float32)])
def test_nothing_gets_no_noise(summed):
    found = add_noise(summed, FLOATS, noise_multiplier=1.0, rng="system")
    assert type(found) is type(summed)
    assert len(found) == 0


@pytest.mark.parametrize("rng", discrete.EXACT)
def test_exact_noise_differs_from_call_to_call(rng):
    # The same in all of 30 elements with probability far below 2**-500.
    first, second = (add_noise(np.zeros(30, np.int64), INTEGERS, noise_multiplier=1.0, rng=rng) for _ in range(2))
    assert first.tolist() != second.tolist()


def test_a_sum_on_a_grid_end_to_end(asked):
    grads = np.array([[3.0, 4.0], [0.3, 0.4]])
    summed, _ = gradclip.per_example_clip(grads, 1.0, grid=GRID)
    found = (
        add_noise(summed, clipped_sum_sensitivity(1.0, batch_size=2, grid=GRID), noise_multiplier=1.0, rng="system")
        / GRID
    )
    assert asked[0][0] == GRID
    assert found == pytest.approx([0.9 + 1000 / GRID, 1.2 + 1001 / GRID], abs=4 / GRID)


def test_a_sum_that_was_cast_moves_further(asked):
    thousand = clipped_sum_sensitivity(1.0, batch_size=1000)
    before, after = torch.tensor([994.0]), torch.tensor([995.0])
    assert (after.bfloat16() - before.bfloat16()).item() == 4.0 > 3 * thousand.total
    for dtype in (torch.bfloat16, torch.float16):
        with pytest.raises(ValueError, match="is for sums in a wider dtype: rounding 1000 units to"):
            add_noise({"w": before, "b": before.to(dtype)}, thousand, noise_multiplier=1.0, rng="system")
    with pytest.raises(ValueError, match="the sum is float32, and this sensitivity is for sums in a wider dtype"):
        add_noise(
            before,
            clipped_sum_sensitivity(1.0, batch_size=1000, sum_dtype="float64"),
            noise_multiplier=1.0,
            rng="system",
        )
    assert asked == []
    add_noise(before, thousand, noise_multiplier=1.0, rng="system")
    for name in ("bfloat16", "float16"):
        halves = clipped_sum_sensitivity(1.0, "replace_one", batch_size=1000, layout=SumLayout(partial_sums_in=name))
        add_noise(before.to(getattr(torch, name)), halves, noise_multiplier=1.0, rng="system")
    assert len(asked) == 3


LAYOUTS = (SumLayout(elements=1), SumLayout(summed_in="float32"), SumLayout(microbatches=8, partial_sums=4))


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one", "zero_out"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"normalize_by": 3.0}, *({"layout": layout} for layout in LAYOUTS)],
)
def test_a_sum_in_the_dtype_of_its_sensitivity_is_accepted(asked, relation, settings):
    for count in (1, 7, 4096):
        for name in ("float32", "float64"):
            sensitivity = clipped_sum_sensitivity(0.3, relation, batch_size=count, sum_dtype=name, **settings)
            add_noise(np.ones(2, name), sensitivity, noise_multiplier=1.0, rng="system")
    assert len(asked) == 6


@pytest.mark.parametrize("settings", [{"return_values": True}, {"return_norms": True}, {"has_aux": True}])
@pytest.mark.parametrize("rng", ["system", torch.Generator()])
def test_outputs_of_single_examples_are_no_sum(asked, settings, rng):
    def loss(w, x):
        value = (w * x).sum()
        return (value, value) if "has_aux" in settings else value

    result = gradclip.clipped_grad(loss, 1.0, pad_to=8, **settings)(torch.ones(2), torch.ones(8, 2))
    for given in (result, {"step": [result[1]]}):
        with pytest.raises(TypeError, match=r"the sum comes with ExampleOutputs, .* Pass the sum alone: add_noise\("):
            add_noise(given, FLOATS, noise_multiplier=1.0, rng=rng)
    add_noise(result[0], FLOATS, noise_multiplier=1.0, rng=rng)
    assert len(asked) == (rng == "system")


def test_counts_of_clipped_examples_are_no_sum(asked):
    result = gradclip.per_example_clip(np.ones((2, 2)), 1.0, grid=GRID)
    with pytest.raises(TypeError, match="the sum comes with PerExampleInfo"):
        add_noise(result, clipped_sum_sensitivity(1.0, batch_size=2, grid=GRID), noise_multiplier=1.0, rng="system")
    assert asked == []


@pytest.mark.parametrize(
    ("summed", "sensitivity", "error", "text"),
    [
        (np.ones(2), 1.0, TypeError, r"must be a gradclip.Sensitivity, got 1.0 of type float. Take it from .sens"),
        (np.ones(2), clipped_sum_sensitivity(1.0), ValueError, "the rounding of this sensitivity is unknown"),
        (
            np.ones(2),
            clipped_sum_sensitivity(1.0, nonfinite="propagate"),
            ValueError,
            "sensitivity of this sum is infinite",
        ),
        (
            np.ones(2),
            Sensitivity(0.0, "example", relation="zero_out"),
            ValueError,
            "the sensitivity is 0, so no noise would be",
        ),
        (
            np.ones(2),
            INTEGERS,
            TypeError,
            "for a sum on a grid, of int64 arrays, but the sum is float64. Add the noise",
        ),
        (np.ones(2, np.int64), FLOATS, TypeError, "is int64, a sum on a grid, but this sensitivity is for a sum of fl"),
        ({"w": np.ones(2, np.int32)}, INTEGERS, TypeError, r"int64 arrays, but \['w'\] is int32"),
        (
            {"w": np.ones(2, complex)},
            FLOATS,
            TypeError,
            r"\['w'\] is complex128. Pass the real and the imaginary parts",
        ),
        ([1.0], FLOATS, TypeError, r"must hold arrays of floats, but \[0\] is float\."),
        (np.array([True]), FLOATS, TypeError, "must hold arrays of floats, but the sum is bool"),
        (torch.eye(2).to_sparse(), FLOATS, TypeError, r"Zeros need noise as well: make it dense by \.to_dense\(\)\.$"),
    ],
)
@pytest.mark.parametrize("rng", ["system", np.random.default_rng(0)])
def test_sums_and_sensitivities_without_a_proof_are_refused(summed, sensitivity, error, text, rng, asked):
    with pytest.raises(error, match=text):
        add_noise(summed, sensitivity, noise_multiplier=1.0, rng=rng)
    assert asked == []


def test_a_multiplier_and_an_rng_are_checked(asked):
    with pytest.raises(ValueError, match="noise_multiplier must be positive and finite, got 0"):
        add_noise(np.ones(2), FLOATS, noise_multiplier=0, rng="system")
    with pytest.raises(
        ValueError, match="must be 'system', 'urandom', 'opendp' or a generator of the arrays' framework, got 'sytem'"
    ):
        add_noise(np.ones(2), FLOATS, noise_multiplier=1.0, rng="sytem")
    coarse = clipped_sum_sensitivity(1.0, batch_size=8, grid=16)
    with pytest.raises(ValueError, match="noise of 16 steps is too coarse"):
        add_noise(np.ones(2, np.int64), coarse, noise_multiplier=1.0, rng="system")
    assert asked == []

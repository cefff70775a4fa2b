"""Training with and without clipping: the same where nothing is clipped, and told where it diverges."""

import json
import math
from functools import cache

import numpy as np
import pytest

from demo import DemoSettings, run_demo, settings_from
from demo_training import trainer


@cache
def trained(clipping, max_norm=0.9, rate=0.1):
    return trainer(DemoSettings(steps=5, seeds=2, max_norm=max_norm), clipping)(rate)


def test_all_start_alike_and_clipping_parts_them():
    plain, clipped = trained("none"), trained("fixed")
    assert plain.losses.shape == clipped.norms.shape == clipped.layers.bias.shape == (2, 5)
    np.testing.assert_allclose(plain.losses[:, 0], clipped.losses[:, 0], rtol=1e-5)
    assert plain.losses[0, 0] != plain.losses[1, 0]
    assert plain.losses[0, -1] != pytest.approx(clipped.losses[0, -1], rel=1e-3)
    assert (plain.max_norms == math.inf).all()
    assert (clipped.max_norms == np.float32(0.9)).all()


def test_an_infinite_threshold_trains_as_none():
    np.testing.assert_allclose(trained("fixed", math.inf).losses, trained("none").losses, rtol=1e-5)


def test_the_adaptive_threshold_follows_the_norms():
    adaptive = trained("adaptive")
    assert (adaptive.max_norms[:, 0] == math.inf).all()
    np.testing.assert_allclose(adaptive.max_norms[:, 1], adaptive.norms[:, 0], rtol=1e-6)


def test_the_norms_of_the_layers_make_up_the_norm():
    curves = trained("none")
    squares = sum(np.square(norms.astype(np.float64)) for norms in curves.layers)
    np.testing.assert_allclose(np.sqrt(squares), curves.norms, rtol=1e-6)


def test_divergence_is_reported_and_drawn(tmp_path):
    run_demo(
        settings_from(["--steps", "6", "--seeds", "1", "--rates", "3e38", "--max-norm", "inf", "--out", str(tmp_path)])
    )
    found = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert found["settings"]["max_norm"] == "inf"
    assert (found["runs"][0]["diverged"], found["runs"][0]["test_accuracy"]) == ([True], [0])
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

"""Threads that round in one direction, as some libraries leave it: results are those of rounding to nearest."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL, by_name
from fresh_process import run
from rounding import DIRECTIONS, rounding

HOSTS = [f for f in ALL if f.name in ("numpy", "torch", "jax")]


def in_place(call):
    def done(tree):
        holders = [SimpleNamespace(grad=x) for x in tree]
        call(holders)
        return [holder.grad for holder in holders]

    return done


CALLS = {
    "global_norm": lambda tree: [gradclip.global_norm(tree, ord) for ord in (1, 2, 2.5, 3)],
    "clip_by_global_norm": lambda tree: gradclip.clip_by_global_norm(tree, 0.3)[0],
    "clip_by_global_norm, kept": lambda tree: gradclip.clip_by_global_norm(tree, 1e9)[0],
    "clip_by_layer_norm": lambda tree: gradclip.clip_by_layer_norm(tree, 0.3, ord=3)[0],
    "clip_by_unit_norm": lambda tree: gradclip.clip_by_unit_norm(tree, 0.3)[0],
    "per_example_clip": lambda tree: [gradclip.per_example_clip(tree, 0.3)[0]],
    "clip_grad_norm_": in_place(lambda holders: gradclip.clip_grad_norm_(holders, 0.3)),
}


def given(framework, strided):
    """Return leaves of random numbers, in new memory; strided where the framework has such."""
    values = np.random.default_rng(0).normal(size=(2, 40, 7)).astype(np.float32)
    if strided and framework.name == "torch":
        return [torch.from_numpy(x.repeat(2, axis=1))[:, ::2] for x in values]
    if strided and framework.name == "numpy":
        return [x.repeat(2, axis=1)[:, ::2] for x in values]
    return [framework.from_numpy(x.copy()) for x in values]


def bits(framework, result):
    leaves = [x for part in result for x in (part if isinstance(part, list | tuple) else [part])]
    return [framework.to_numpy(x).tobytes() for x in leaves]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("framework", HOSTS, ids=by_name)
def test_results_have_the_same_bits(framework, name, strided, direction):
    expected = bits(framework, CALLS[name](given(framework, strided)))
    tree = given(framework, strided)
    with rounding(direction):
        found = CALLS[name](tree)
    assert bits(framework, found) == expected


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_exact_answers_are_right(direction):
    rng = np.random.default_rng(0)
    vectors = [[3.0, 4.0], *rng.normal(size=(100, 2)).tolist()]
    for vector in vectors:
        norm = float(np.hypot(*vector))
        thresholds = [float(np.nextafter(norm, 0)), norm, float(np.nextafter(norm, 9))]
        expected = [gradclip.norm_at_most(np.array(vector), threshold) for threshold in thresholds]
        with rounding(direction):
            assert [gradclip.norm_at_most(np.array(vector), threshold) for threshold in thresholds] == expected


def test_results_without_kernels_have_the_same_bits(tmp_path):
    printed = run(
        f"""
        import ctypes
        import numpy as np
        import gradclip

        x = np.random.default_rng(0).normal(size=500)
        for direction in (0, *{list(DIRECTIONS.values())}):
            ctypes.CDLL(None).fesetround(direction)
            clipped, norm = gradclip.clip_by_global_norm(x, 0.3)
            kept = gradclip.clip_by_global_norm(np.array([3.0, 4.0]), 5.0)[0]
            ctypes.CDLL(None).fesetround(0)
            print(float(norm).hex(), hash(clipped.tobytes()), kept.tolist())
        """,
        tmp_path,
        GRADCLIP_NATIVE="0",
    )
    assert len(printed.splitlines()) == 4
    assert len(set(printed.splitlines())) == 1

"""What is set around a call and is no matter: how NumPy treats errors, and how many threads there are."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

import gradclip


def test_what_numpy_is_told_to_do_about_errors_is_no_matter():
    tiny = gradclip.partial_norm(np.array([1e-320, 1e-320]), 1)
    tree = {"w": np.array([1e-320, 1e300, 0.0]), "h": np.array([1e-7, 6e4], np.float16)}
    with np.errstate(all="raise"):
        for ord in (1, 2, 3, math.inf):
            part = gradclip.partial_norm(tree, ord)
            assert math.isclose((part + part).norm, 2 ** (1 / ord) * 1e300, rel_tol=1e-9)
            part.clip(tree, 1e-300)
            gradclip.clip_by_global_norm(tree, 1e-300, ord=ord)
            gradclip.clip_by_layer_norm(tree, 1e-300, ord=ord)
            gradclip.layer_norms(tree, ord)
            gradclip.clip_grad_norm_({k: v.copy() for k, v in tree.items()}, 1e-300, ord)
        assert (tiny + tiny).norm == tiny.norm * 2 == tiny.clip(np.array([1e-320]), 1.0)[0] * 4
        gradclip.clip_by_value(tree, 1e-320)
        gradclip.per_example_clip(np.stack([tree["w"], tree["w"][::-1]]), 1e-300)
        gradclip.norm_at_most(tree, 1e300)
        gradclip.clipped_sum_sensitivity(1e-300)


@pytest.mark.parametrize("threads", ["2147483648", "9" * 5000, "0" * 5000 + "1", " 2 ", "٣", "-1", "1e3", ""])
def test_any_number_of_threads_that_is_asked_for_works(threads):
    code = "import numpy, gradclip; print(gradclip.global_norm(numpy.ones(4_000_000, numpy.float32)))"
    environment = os.environ | {"OMP_NUM_THREADS": threads}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "2000.0"

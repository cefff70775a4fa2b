"""One case of every framework, eager and traced, new and in place, for each choice of which elements share a norm.

All of them hold 3 and 4, of norm 5, beside 0.3 and 0.4, of norm 0.5, and clip to 1.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from frameworks import ALL, by_name

pytestmark = pytest.mark.every_case

EXPECTED = [[0.6, 0.8], [0.3, 0.4]]
NEW = {
    "whole": (lambda tree: gradclip.clip_by_global_norm(tree[0], 1.0), [0.6, 0.8], 5.0),
    "groups": (lambda tree: gradclip.clip_by_layer_norm(tree, 1.0), EXPECTED, [5.0, 0.5]),
    "rows": (lambda tree: gradclip.clip_by_unit_norm(tree, 1.0, unit_axis=0), EXPECTED, [5.0, 0.5]),
    "examples": (lambda tree: summed(gradclip.per_example_clip(tree, 1.0)), [0.9, 1.2], [5.0, 0.5]),
}
IN_PLACE = {
    "whole": (lambda given: gradclip.clip_grad_norm_(given[:1], 1.0), [[0.6, 0.8], [0.3, 0.4]], 5.0),
    "groups": (lambda given: gradclip.clip_grad_layer_norm_(given, 1.0), EXPECTED, [5.0, 0.5]),
    "rows": (lambda given: gradclip.clip_grad_unit_norm_(given, 1.0, unit_axis=0), [EXPECTED], [[5.0, 0.5]]),
}
ROWS_IN_ONE_ARRAY = ("rows", "examples")


def summed(result):
    total, info = result
    return total, info.norms


def arrays(framework, layout):
    """Return two gradients, or one array of two rows."""
    rows = [[3.0, 4.0], [0.3, 0.4]]
    dtype = framework.dtypes[-1]
    return framework.array(rows, dtype) if layout in ROWS_IN_ONE_ARRAY else [framework.array(r, dtype) for r in rows]


def compiled_by(framework, function, tree):
    """Call the function as code that the framework compiles: XLA's, TensorFlow's or PyTorch's."""
    if framework.name.startswith("tensorflow"):
        import tensorflow as tf

        return tf.function(function)(tree)
    if framework.name.startswith("torch"):
        with framework.mode():
            return torch.compile(function, backend="eager")(tree)
    return framework.call(function, tree)


def assert_close(framework, given, expected):
    found = np.stack([framework.to_numpy(x) for x in given]) if isinstance(given, list) else framework.to_numpy(given)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("layout", NEW)
@pytest.mark.parametrize("framework", ALL, ids=by_name)
def test_new_arrays(framework, layout):
    function, expected, norms = NEW[layout]
    clipped, found = framework.call(function, arrays(framework, layout))
    assert_close(framework, clipped, expected)
    assert_close(framework, found, norms)


@pytest.mark.parametrize("layout", NEW)
@pytest.mark.parametrize("framework", [one for one in ALL if one.name in ("torch", "tensorflow")], ids=by_name)
def test_compiled_code(framework, layout):
    function, expected, norms = NEW[layout]
    clipped, found = compiled_by(framework, function, arrays(framework, layout))
    assert_close(framework, clipped, expected)
    assert_close(framework, found, norms)


@pytest.mark.parametrize("layout", IN_PLACE)
@pytest.mark.parametrize("framework", [one for one in ALL if not one.jit], ids=by_name)
def test_in_place(framework, layout):
    function, expected, norms = IN_PLACE[layout]
    given = arrays(framework, layout)
    holders = [SimpleNamespace(grad=x) for x in (given if isinstance(given, list) else [given])]
    with framework.mode():
        found = function(holders)
    assert_close(framework, [holder.grad for holder in holders], expected)
    assert_close(framework, found, norms)

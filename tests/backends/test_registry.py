"""A framework is a folder and one entry: a toy one, whose arrays wrap NumPy's, is clipped with nothing else changed."""

import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest

import gradclip
from gradclip._src.backends import registry
from gradclip._src.backends.entries import Entry
from gradclip._src.backends.framework import Framework
from gradclip._src.backends.host.arrays import HostArray
from gradclip._src.backends.host.backend import Host


class ToyArray:
    def __init__(self, data):
        self.data = np.asarray(data)
        self.dtype, self.shape = self.data.dtype, self.data.shape

    def __len__(self):
        return len(self.data)


class ToyHost(Host):
    def prepare(self, leaf):
        return super().prepare(leaf.data if isinstance(leaf, ToyArray) else leaf)

    def leave(self, array, leaf):
        return ToyArray(super().leave(array, leaf.data))

    def leave_scalar(self, value, dtype, leaves):
        return ToyArray(super().leave_scalar(value, dtype, leaves))

    def leave_each(self, values, dtype, leaves):
        return [ToyArray(value) for value in super().leave_scalar(values, dtype, leaves)]


class Toy(Framework):
    def backend(self, leaves, scalars):
        return ToyHost()

    def on_host(self, leaf):
        return HostArray.of(leaf.data)

    def as_float(self, array):
        return ToyArray(array.data.astype(float))

    def like(self, leaf, dtype, values):
        return ToyArray(values.astype(dtype))

    def zeros(self, shape, leaf):
        return ToyArray(np.zeros(shape, leaf.dtype))


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    for name in ("_ENTRIES", "_KEY_BY_TYPE", "_LOADED"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))
    module = ModuleType("toy")
    module.ToyArray = ToyArray
    monkeypatch.setitem(sys.modules, "toy", module)
    assert not registry.known(ToyArray(np.float32([1])))
    registry.register(Entry("Toy", "toy", ("ToyArray",), Toy))


def tree_of(*numbers):
    return {"w": [ToyArray(np.float32([number])) for number in numbers]}


def test_a_tree_is_clipped():
    clipped, norm = gradclip.clip_by_global_norm(tree_of(3, 4), 1.0)
    assert [type(x) for x in (*clipped["w"], norm)] == [ToyArray] * 3
    assert [float(x.data[0]) for x in clipped["w"]] == pytest.approx([0.6, 0.8])
    assert norm.data == 5.0


def test_layers_are_measured():
    norms = gradclip.layer_norms({"a": ToyArray([3.0, 4.0]), "b": ToyArray([-2.0])})
    assert {name: float(norm.data) for name, norm in norms.items()} == {"a": 5.0, "b": 2.0}


def test_a_norm_is_decided_exactly():
    assert gradclip.norm_at_most(tree_of(3, 4), 5)
    assert not gradclip.norm_at_most(tree_of(1, 1e-5), 1)


def test_sums_are_tested():
    def mean(grads):
        return ToyArray(grads.data.mean(axis=0))

    report = gradclip.check_sensitivity(mean, ToyArray(np.ones((4, 3))), sensitivity=0.25, trials=1)
    assert not report.holds


def test_errors_name_paths_and_frameworks():
    with pytest.raises(FloatingPointError, match=r"\['w'\]\[1\]"):
        gradclip.clip_by_global_norm(tree_of(1, np.nan), 1.0, nonfinite="raise")
    with pytest.raises(
        TypeError, match=r"NumPy, PyTorch, JAX, TensorFlow, MLX or Toy, got 'x' of type str at \['w'\]\[1\]"
    ):
        gradclip.clip_by_global_norm({"w": [ToyArray([1.0]), "x"]}, 1.0)
    with pytest.raises(TypeError, match="one framework, got numpy and toy"):
        gradclip.clip_by_global_norm([ToyArray([1.0]), np.ones(1)], 1.0)
    with pytest.raises(TypeError, match="argument 0 holds Toy arrays, which gradclip cannot differentiate"):
        gradclip.clipped_grad(lambda w, x: 0.0, 1.0)(ToyArray([1.0]), np.ones((2, 1)))


@pytest.mark.parametrize("imported", ["torch", "jax", "torch, jax"])
def test_a_framework_that_is_imported_is_not_touched(imported):
    code = (
        f"import sys, numpy, {imported}, gradclip; gradclip.clip_by_global_norm({{'w': numpy.ones(3)}}, 1.0);"
        "print(sorted(name for name in sys.modules if name.startswith('gradclip') and name.endswith('.framework')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['gradclip._src.backends.framework']"

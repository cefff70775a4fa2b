"""The clipping modules of `declearn`, within an Optimizer that is built from names and configurations."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorflow as tf
import torch
from declearn.model.haiku import JaxNumpyVector
from declearn.model.sklearn import NumpyVector
from declearn.model.tensorflow import TensorflowVector
from declearn.model.torch import TorchModel, TorchVector
from declearn.optimizer import Optimizer, list_optim_modules
from declearn.optimizer import modules as originals
from declearn.optimizer.modules import OptiModule
from declearn.utils import set_device_policy

from gradclip.integrations import declearn as ours
from gradclip.integrations.declearn import L2Clipping, L2GlobalClipping
from parity_support import arguments, assert_just_below

# The import of declearn's JAX vectors switches 64-bit mode on for the whole process.
jax.config.update("jax_enable_x64", False)

BOTH = [L2Clipping, L2GlobalClipping]
NAMES = {"l2-clipping": L2Clipping, "l2-global-clipping": L2GlobalClipping}
VECTORS = {
    "numpy": lambda values: NumpyVector({k: np.array(v, np.float32) for k, v in values.items()}),
    "torch": lambda values: TorchVector({k: torch.tensor(v, dtype=torch.float32) for k, v in values.items()}),
    "jax": lambda values: JaxNumpyVector({k: jnp.array(v, jnp.float32) for k, v in values.items()}),
    "tensorflow": lambda values: TensorflowVector({k: tf.constant(v, tf.float32) for k, v in values.items()}),
}
every_vector = pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS)
VALUES = {"w": [[3.0, 4.0]], "b": [12.0]}


@pytest.fixture(autouse=True)
def _on_the_cpu():
    set_device_policy(gpu=False)


def numbers(vector):
    return {name: np.asarray(array).tolist() for name, array in vector.coefs.items()}


def updates(modules, gradients):
    """Return what an Optimizer of rate 1 makes of gradients: their clipped opposites."""
    return Optimizer(lrate=1.0, modules=modules).compute_updates_from_gradients(None, gradients)


def test_signatures():
    assert arguments(L2Clipping) == arguments(L2GlobalClipping) == [("max_norm", 1.0)]


def test_names_and_classes():
    assert {name: cls for name, cls in list_optim_modules().items() if name in NAMES} == NAMES
    assert {cls.name: cls for cls in BOTH} == NAMES
    assert issubclass(L2Clipping, originals.L2Clipping)
    assert issubclass(L2GlobalClipping, originals.L2GlobalClipping)


@every_vector
def test_global_clipping_by_name(vector):
    clipped = updates([("l2-global-clipping", {"max_norm": 6.5})], vector(VALUES))
    assert type(clipped) is type(vector(VALUES))
    assert_just_below(clipped.coefs["w"], [[-1.5, -2.0]], "float32")
    assert_just_below(clipped.coefs["b"], [-6.0], "float32")


@every_vector
def test_clipping_of_each_array_by_name(vector):
    clipped = updates([("l2-clipping", {"max_norm": 10.0})], vector(VALUES))
    assert_just_below(clipped.coefs["w"], [[-3.0, -4.0]], "float32")
    assert_just_below(clipped.coefs["b"], [-10.0], "float32")


@every_vector
def test_default_threshold_is_one(vector):
    clipped = updates(["l2-global-clipping"], vector(VALUES))
    assert_just_below(clipped.coefs["w"], [[-3 / 13, -4 / 13]], "float32")
    clipped = updates(["l2-clipping"], vector(VALUES))
    assert_just_below(clipped.coefs["w"], [[-0.6, -0.8]], "float32")


@every_vector
@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("max_norm", [13.0, math.inf])
def test_small_gradients_come_back_as_they_were_and_the_input_is_left_alone(vector, cls, max_norm):
    gradients = vector(VALUES)
    kept = cls(max_norm=max_norm).run(gradients)
    assert type(kept) is type(gradients)
    assert numbers(kept) == VALUES
    cls(max_norm=0.5).run(gradients)
    assert numbers(gradients) == VALUES


@every_vector
def test_empty_vector_is_returned_as_it_is(vector):
    empty = vector({})
    assert L2GlobalClipping().run(empty) is empty
    assert L2Clipping().run(empty).coefs == {}


@every_vector
@pytest.mark.parametrize("cls", BOTH)
def test_all_zero_vector(vector, cls):
    assert numbers(cls().run(vector({"w": [0.0, 0.0]}))) == {"w": [0.0, 0.0]}


@every_vector
@pytest.mark.parametrize("cls", BOTH)
def test_arrays_stay_in_their_order(vector, cls):
    assert list(cls(0.5).run(vector(VALUES)).coefs) == ["w", "b"]


@every_vector
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nonfinite_gradients_are_seen_wherever_they_share_a_norm(vector, bad):
    gradients = {"w": [bad, 1.0], "b": [2.0]}
    assert all(np.isnan(v).all() for v in map(np.asarray, L2GlobalClipping().run(vector(gradients)).coefs.values()))
    separate = L2Clipping().run(vector(gradients)).coefs
    assert np.isnan(np.asarray(separate["w"])).all()
    assert_just_below(separate["b"], [1.0], "float32")


def test_each_array_keeps_its_dtype():
    mixed = NumpyVector({"a": np.array([3.0], np.float16), "b": np.array([4.0], np.float64)})
    clipped = L2GlobalClipping().run(mixed).coefs
    assert (clipped["a"].dtype, clipped["b"].dtype) == (np.float16, np.float64)
    assert_just_below(clipped["a"], [0.6], "float16")
    assert_just_below(clipped["b"], [0.8], "float64")


@pytest.mark.parametrize("cls", BOTH)
def test_rows_of_an_embedding_stay_sparse(cls):
    # Row 1 occurs twice, so that it is (3, 4).
    rows = tf.IndexedSlices(tf.constant([[1.0, 1.0], [2.0, 3.0]]), tf.constant([1, 1]), tf.constant([5, 2]))
    clipped = cls(max_norm=1.0).run(TensorflowVector({"w": rows})).coefs["w"]
    assert isinstance(clipped, tf.IndexedSlices)
    assert_just_below(tf.convert_to_tensor(clipped)[1], [0.6, 0.8], "float32")


def test_half_precision_does_not_overflow():
    for vector in (
        NumpyVector({"a": np.array([3e4, 4e4], np.float16)}),
        TorchVector({"a": torch.tensor([3e4, 4e4]).half()}),
        TensorflowVector({"a": tf.constant([3e4, 4e4], tf.float16)}),
    ):
        assert_just_below(L2GlobalClipping(5.0).run(vector).coefs["a"], [3.0, 4.0], "float16")


@pytest.mark.parametrize("cls", BOTH)
def test_configuration_round_trip(cls):
    module = cls(max_norm=2.5)
    assert module.get_config() == {"max_norm": 2.5}
    for again in (cls.from_config(module.get_config()), OptiModule.from_specs(cls.name, module.get_config())):
        assert type(again) is cls
        assert again.max_norm == 2.5
    assert module.get_state() == {}
    assert module.collect_aux_var() is None


def test_optimizer_round_trip_through_json():
    optimizer = Optimizer(lrate=0.5, modules=["l2-clipping", ("l2-global-clipping", {"max_norm": 3.0}), "momentum"])
    again = Optimizer.from_config(json.loads(json.dumps(optimizer.get_config())))
    assert [type(module) for module in again.modules[:2]] == [L2Clipping, L2GlobalClipping]
    assert [module.max_norm for module in again.modules[:2]] == [1.0, 3.0]
    assert again.get_config() == optimizer.get_config()


@pytest.mark.parametrize("cls", BOTH)
@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_negative_and_nan_thresholds(cls, max_norm):
    with pytest.raises(ValueError, match="max_norm must not be negative or NaN"):
        cls(max_norm=max_norm)
    with pytest.raises(ValueError, match="max_norm must not be negative or NaN"):
        Optimizer(lrate=0.1, modules=[(cls.name, {"max_norm": max_norm})])


@pytest.mark.parametrize("name", NAMES)
def test_unknown_configuration(name):
    with pytest.raises(TypeError):
        Optimizer(lrate=0.1, modules=[(name, {"limit": 1.0})])


def test_optimizer_trains_a_model():
    torch.manual_seed(0)
    model = TorchModel(torch.nn.Linear(2, 1, bias=False), torch.nn.MSELoss(reduction="none"))
    (name,) = model.get_weights().coefs
    gradients = TorchVector({name: torch.tensor([[3.0, 4.0]])})
    before = model.get_weights().coefs[name].clone()
    Optimizer(lrate=1.0, modules=["l2-global-clipping"]).apply_gradients(model, gradients)
    moved = before - model.get_weights().coefs[name]
    assert moved.flatten().tolist() == pytest.approx([0.6, 0.8], abs=2.0**-23)


@pytest.mark.parametrize("name", ["L2Clipping", "L2GlobalClipping"])
def test_integers_count_as_they_do_in_declearn(name):
    given = NumpyVector({"w": np.array([0.5, -0.5]), "n": np.array([3, 4])})
    found, expected = (getattr(module, name)(max_norm=1.0).run(given).coefs for module in (ours, originals))
    for key, x in found.items():
        np.testing.assert_allclose(x, expected[key], rtol=1e-6)
        assert x.dtype == np.float64

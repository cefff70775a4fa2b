"""Settings that are none are refused where they are given, by errors that say what was passed and what to do."""

from collections import UserDict
from fractions import Fraction
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip.integrations import jax_privacy
from gradclip.integrations import torch as named_as_torch

ROWS = {"w": np.array([[3.0, 4.0], [0.3, 0.4]])}
TREE = {"w": np.array([3.0, 4.0]), "b": np.array([12.0])}


def loss(w, x):
    return (w * x).sum()


def holder():
    return SimpleNamespace(grad=torch.tensor([3.0, 4.0]))


MADE = {
    "per_example_clip": (
        lambda **flags: gradclip.per_example_clip(ROWS, 1.0, **flags),
        ["per_layer", "uniform", "to_unit"],
    ),
    "sensitivity": (lambda **flags: gradclip.clipped_sum_sensitivity(1.0, **flags), ["per_layer", "to_unit"]),
    "clipped_grad": (
        lambda **flags: gradclip.clipped_grad(loss, 1.0, **flags),
        ["per_layer", "uniform", "has_aux", "keep_batch_dim", "return_values", "return_norms"],
    ),
    "clipped_fun": (
        lambda **flags: gradclip.clipped_fun(lambda x: x, 1.0, **flags),
        ["per_layer", "uniform", "has_aux", "keep_batch_dim", "return_norms"],
    ),
    "torch.clip_grad_norm_": (
        lambda **flags: named_as_torch.clip_grad_norm_([holder()], 1.0, **flags),
        ["error_if_nonfinite"],
    ),
    "torch.get_total_norm": (
        lambda **flags: named_as_torch.get_total_norm([torch.ones(2)], **flags),
        ["error_if_nonfinite"],
    ),
    "jax_privacy.clip_pytree": (
        lambda **flags: jax_privacy.clip_pytree([jnp.ones(3)], 1.0, **flags),
        ["rescale_to_unit_norm", "nan_safe", "return_zero"],
    ),
    "jax_privacy.clipped_fun": (
        lambda **flags: jax_privacy.clipped_fun(jnp.mean, **flags),
        ["has_aux", "keep_batch_dim", "rescale_to_unit_norm", "return_norms", "nan_safe"],
    ),
    "jax_privacy.clipped_grad": (
        lambda **flags: jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, **flags),
        ["has_aux", "keep_batch_dim", "rescale_to_unit_norm", "return_grad_norms", "return_values", "nan_safe"],
    ),
}


@pytest.mark.parametrize(("call", "flag"), [(name, flag) for name, (_, flags) in MADE.items() for flag in flags])
def test_flags_are_booleans(call, flag):
    make = MADE[call][0]
    for wrong in ("yes", "False", 1, 0, 1.0, None, [], np.array([True, False])):
        with pytest.raises(TypeError, match=f"{flag} must be True or False, got "):
            make(**{flag: wrong})
    make(**{flag: np.False_})


WRONG = [
    ({"rule": "auto"}, ValueError, "rule must be one of 'clip', 'normalize', 'automatic', got 'auto'"),
    ({"rule": ["clip"]}, ValueError, "rule must be one of"),
    ({"gamma": -1.0}, ValueError, "gamma must be a finite number > 0, got -1.0"),
    ({"gamma": True}, ValueError, "gamma must be a finite number > 0, got True"),
    ({"gamma": 10**400}, ValueError, "gamma must be a finite number > 0, got an integer of 1329 bits"),
    ({"nonfinite": "ignore"}, ValueError, "nonfinite must be one of"),
    ({"sum_dtype": "float16"}, ValueError, "sum_dtype must be float32, float64 or None"),
    ({"grid": 1.5}, ValueError, "grid must be the number of steps"),
    ({"grid": 2**60}, ValueError, "grid must be the number of steps"),
    ({"grid": 16, "sum_dtype": "float32"}, ValueError, "leave out sum_dtype"),
    ({"grid": 16, "max_norm": 0.0}, ValueError, "max_norm must be positive and finite"),
    ({"max_norm": None}, TypeError, "max_norm must be a real number"),
    ({"max_norm": {}}, ValueError, "max_norm holds no thresholds"),
    ({"max_norm": {"w": 1.0}, "per_layer": True}, ValueError, "per_layer=True takes one number"),
]


@pytest.mark.parametrize(("settings", "error", "message"), WRONG)
def test_how_examples_are_clipped_is_checked_when_a_function_is_made(settings, error, message):
    settings = {"max_norm": 1.0} | settings
    for make in (
        lambda **settings: gradclip.clipped_grad(loss, **settings),
        lambda **settings: gradclip.clipped_fun(lambda x: x, **settings),
        lambda **settings: gradclip.per_example_clip(ROWS, **settings),
    ):
        with pytest.raises(error, match=message):
            make(**settings)


@pytest.mark.parametrize("gamma", [np.float32(0.5), np.float64(0.5), Fraction(1, 2), 0.5])
def test_numbers_of_any_kind_are_numbers(gamma):
    summed, _ = gradclip.per_example_clip(np.array([[3.0, 4.0]]), 1.0, rule="automatic", gamma=gamma)
    np.testing.assert_allclose(summed, [3 / 5.5, 4 / 5.5], rtol=1e-9)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"fun": 3}, TypeError, "fun must be a function, got 3 of type int"),
        ({"prng_argnum": "a"}, ValueError, "prng_argnum='a' must be >= 0"),
        ({"prng_argnum": 2.0}, ValueError, "prng_argnum=2.0 must be >= 0"),
        ({"batch_argnums": 1.0}, TypeError, "batch_argnums must be a position or several, got 1.0"),
        ({"batch_argnums": (1, 1)}, ValueError, "batch_argnums names a position twice"),
        ({"argnums": None}, TypeError, "argnums must be a position or several, got None"),
        ({"argnums": [0, 0]}, ValueError, "argnums names a position twice"),
        ({"microbatch_size": 1.5}, ValueError, "microbatch_size must be a whole number, 1 or more, got 1.5"),
        ({"pad_to": "8"}, TypeError, "pad_to must be a whole number, 1 or more, got '8' of type str"),
    ],
)
def test_positions_and_counts_are_whole_numbers(settings, error, message):
    with pytest.raises(error, match=message):
        gradclip.clipped_grad(**({"fun": loss, "max_norm": 1.0} | settings))


def test_scalars_of_numpy_are_positions():
    made = gradclip.clipped_grad(loss, 1.0, argnums=np.int64(0), batch_argnums=np.int64(1), microbatch_size=np.int64(2))
    assert made(jnp.zeros(2), jnp.array([[0.3, 0.4]])).tolist() == pytest.approx([0.3, 0.4])


def test_sparse_tensors_are_no_examples():
    rows = torch.eye(3).to_sparse()
    with pytest.raises(TypeError, match=r"must be dense, got a torch.sparse.* at \['w'\]. Call .to_dense\(\) on it"):
        gradclip.per_example_clip({"w": rows}, 1.0)


@pytest.mark.parametrize("threshold", [Fraction(1, 3), Fraction(10, 3), 2**53 + 1, np.float32(0.1), torch.tensor(0.5)])
def test_thresholds_of_layers_in_place_are_any_numbers(threshold):
    gradient = torch.tensor([3.0, 4.0], dtype=torch.float64)
    norms = gradclip.clip_grad_layer_norm_([SimpleNamespace(grad=gradient)], threshold)
    assert [float(norm) for norm in norms] == [5.0]
    assert float(gradient.norm()) == pytest.approx(min(5.0, float(threshold)), rel=1e-9)


@pytest.mark.parametrize("thresholds", [{1.0}, {"w": 1.0}, len, iter([1.0])])
def test_thresholds_of_parameters_stand_in_order(thresholds):
    gradient = holder()
    with pytest.raises(TypeError, match="max_norm must be a number, or a list with one for each of the 1 parameters"):
        gradclip.clip_grad_layer_norm_([gradient], thresholds)
    assert gradient.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ({"w": 1.0}, r"there is none for \['b'\]\.$"),
        ({"w": 1.0, "b": 1.0, "c": 1.0}, r"no gradient lies at \['c'\]\.$"),
        ({"v": 1.0, "b": 1.0}, r"there is none for \['w'\], and no gradient lies at \['v'\]\.$"),
        ([1.0, 1.0], r"there is none for \['b'\], \['w'\], and no gradient lies at \[0\], \[1\]\.$"),
    ],
)
def test_what_has_no_threshold_is_named(prefix, message):
    with pytest.raises(ValueError, match=f"^the thresholds must be one number or a prefix .*{message}"):
        gradclip.clip_by_layer_norm(TREE, prefix)
    with pytest.raises(ValueError, match=f"^prefix must be one number or a prefix .*{message}"):
        gradclip.layer_norms(TREE, prefix=prefix)


class Frame:
    """What is no array, but becomes one, as a table of pandas."""

    def to_numpy(self):
        return np.ones(2)

    def __repr__(self):
        return "a\n0  3.0"


@pytest.mark.parametrize(
    ("leaf", "advice"),
    [
        (torch.nn.Linear(2, 1), "of type Linear .* Of a module pass the gradients"),
        (UserDict(w=np.ones(2)), r"of type UserDict .* Pass dict\(...\) of it"),
        ({1.0, 2.0}, r"of type set .* Pass list\(...\) of it"),
        (Frame(), r"of type Frame .* Pass its to_numpy\(\)"),
    ],
)
def test_what_is_no_array_is_named_with_what_to_pass(leaf, advice):
    for call in (gradclip.global_norm, gradclip.partial_norm, lambda tree: gradclip.clip_by_value(tree, 1.0)):
        with pytest.raises(TypeError, match=f"must be an array of NumPy, PyTorch or JAX, got .*{advice}"):
            call({"x": leaf})


def test_generators_are_named_with_what_to_pass():
    with pytest.raises(TypeError, match=r"of type generator at the root. Pass list\(...\) of it"):
        gradclip.global_norm(x for x in [jnp.ones(2)])


@pytest.mark.parametrize(
    ("leaf", "error", "message"),
    [
        (torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), TypeError, "a nested tensor cannot be"),
        (torch.ones(2).to(torch.float8_e4m3fn), TypeError, "has dtype float8_e4m3fn, which cannot be clipped"),
        (torch.ones(2, device="meta"), ValueError, "on the meta device holds no values"),
        (jax.random.key(0), TypeError, "has dtype key<fry>, which cannot be clipped"),
    ],
)
def test_exact_checks_refuse_what_holds_no_numbers(leaf, error, message):
    with pytest.raises(error, match=message):
        gradclip.norm_at_most(leaf, 1.0)


def test_tensors_without_values_have_no_partial_norm_and_are_no_thresholds():
    with pytest.raises(ValueError, match="on the meta device holds no values"):
        gradclip.partial_norm(torch.ones(2, device="meta"))
    for call in (
        gradclip.clip_by_global_norm,
        gradclip.clip_by_layer_norm,
        gradclip.clip_by_value,
        gradclip.norm_at_most,
    ):
        with pytest.raises(ValueError, match="is a tensor on the meta device, which holds no value"):
            call(TREE, torch.tensor(1.0, device="meta"))


def test_one_threshold_says_where_several_go():
    with pytest.raises(TypeError, match=r"Several thresholds, .* are for gradclip.clip_by_layer_norm"):
        gradclip.clip_by_global_norm(TREE, {"w": 1.0, "b": 1.0})


@pytest.mark.parametrize("tensors", [None, 3.0, torch.nn.Linear(2, 1), {"w": torch.ones(2)}])
def test_total_norms_are_those_of_tensors(tensors):
    with pytest.raises(TypeError, match=r"tensors must be a tensor or an iterable of them, got .* Pass the gradients"):
        named_as_torch.get_total_norm(tensors)


@pytest.mark.parametrize("scalar", [jnp.ones(()), jax.random.key(0)])
def test_scalars_of_jax_are_no_parameters(scalar):
    with pytest.raises(TypeError, match=r"parameters must be an iterable of objects with a \.grad"):
        gradclip.grad_norm(scalar)


@pytest.mark.parametrize("name", ["process_group", "mesh"])
@pytest.mark.parametrize("value", ["dp", 3, object(), ["dp"]])
def test_groups_are_groups_where_there_are_no_other_processes(name, value):
    for call in (lambda **named: gradclip.clip_grad_norm_([holder()], 1.0, **named), gradclip.grad_norm):
        with pytest.raises(TypeError, match="process_group and mesh take process groups and meshes"):
            call(**({"parameters": [holder()]} if call is gradclip.grad_norm else {}), **{name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, torch.ones(4, 3)), "argument 0 must hold the parameters, in arrays of PyTorch or JAX, got None"),
        (("w", torch.ones(4, 3)), "argument 0 must hold the parameters, in arrays of PyTorch or JAX, got 'w'"),
        ((jnp.zeros(3), torch.ones(4, 3)), "argument 1 holds arrays of torch, but the parameters are of jax"),
        ((torch.zeros(3), jnp.ones((4, 3))), "argument 1 holds arrays of jax, but the parameters are of torch"),
    ],
)
def test_parameters_and_batch_are_arrays_of_one_framework(arguments, message):
    with pytest.raises(TypeError, match=message):
        gradclip.clipped_grad(loss, 1.0)(*arguments)


@pytest.mark.parametrize("arguments", [(torch.zeros(3), torch.ones(4, 3)), (jnp.zeros(3), jnp.ones((4, 3)))])
def test_a_function_without_auxiliary_results_is_named(arguments):
    with pytest.raises(TypeError, match=r"with has_aux=True fun must return a pair, \(value, aux\), got a"):
        gradclip.clipped_grad(loss, 1.0, has_aux=True)(*arguments)


def test_elements_are_counted_of_arrays():
    with pytest.raises(TypeError, match=r"elements must be a number of elements, or a tree of arrays .* got 'many'"):
        gradclip.clipped_grad(loss, 1.0, pad_to=8).sensitivity(elements="many")


def test_examples_to_check_are_arrays_of_examples():
    def summed(rows):
        return rows.sum(axis=0)

    with pytest.raises(ValueError, match="every leaf must carry the batch on axis 0"):
        gradclip.check_sensitivity(summed, [1.0, 2.0], 1.0)
    with pytest.raises(TypeError, match="examples has dtype int64, which cannot be clipped"):
        gradclip.check_sensitivity(summed, np.ones((4, 3), int), 1.0)

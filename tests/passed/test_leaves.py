"""Integers, booleans and what holds no numbers come back as they are and count nothing, in every call on trees."""

import math
from types import SimpleNamespace

import jax
import jax.experimental.sparse
import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch

import gradclip
from gradclip._src.passed.leaves import as_floats, counted, summed, without_integers

FLOATS = {"w": [[3.0, -0.5], [-4.0, 1.5]], "b": [0.25, 12.0]}
INTEGERS = {"steps": ("int64", 100), "mask": ("bool", [True, False]), "bytes": ("uint8", [[255, 3]])}
LAYERS = {"w": 0.5, "b": 3.0}
# Each returns trees that hold something for each leaf of its argument, and scalars.
CALLS = {
    "global_norm": gradclip.global_norm,
    "global_norm, largest": lambda t: gradclip.global_norm(t, math.inf),
    "global_norm, smallest": lambda t: gradclip.global_norm(t, -math.inf),
    "layer_norms": gradclip.layer_norms,
    "clip_by_global_norm": lambda t: gradclip.clip_by_global_norm(t, 1.5),
    "clip_by_global_norm, not clipped": lambda t: gradclip.clip_by_global_norm(t, 1e4),
    "clip_by_layer_norm": lambda t: gradclip.clip_by_layer_norm(t, 0.7, ord=1),
    "clip_by_layer_norm, one layer": lambda t: gradclip.clip_by_layer_norm({"all": t}, {"all": 0.7}),
    "clip_by_layer_norm, some thresholds": lambda t: gradclip.clip_by_layer_norm(t, LAYERS),
    "clip_by_unit_norm": lambda t: gradclip.clip_by_unit_norm(t, 0.7),
    "clip_by_unit_norm, some thresholds": lambda t: gradclip.clip_by_unit_norm(t, LAYERS),
    "clip_by_value": lambda t: gradclip.clip_by_value(t, 0.75),
    "adaptive_grad_clip": lambda t: gradclip.adaptive_grad_clip(t, t, clipping=0.1),
}


def trees(framework):
    """Return a tree of floats, and the same with integers between them."""
    floats = {name: framework.array(values) for name, values in FLOATS.items()}
    with framework.mode():
        integers = {name: framework.from_numpy(np.array(value, dtype)) for name, (dtype, value) in INTEGERS.items()}
    return floats, {**integers, **floats}


def by_path(result):
    return {path: np.asarray(leaf) for path, leaf in zip(*optree.tree_flatten_with_path(result)[:2], strict=True)}


def same(found, expected):
    """Say whether results are those without integers, with the integers as they were and 0 for their norms."""
    found, expected = by_path(found), by_path(expected)
    for path, x in found.items():
        name = next((name for name in path if name in INTEGERS), None)
        of_integers = np.float32(0) if name is None or x.dtype == "float32" else np.array(INTEGERS[name][1])
        y = expected.pop(path) if name is None else of_integers
        if (x.dtype != y.dtype and name is None) or not np.array_equal(x, y):
            return False
    return not expected


@pytest.mark.parametrize("call", CALLS)
def test_integers_stay_and_count_nothing(framework, call):
    floats, mixed = trees(framework)
    assert same(framework.call(CALLS[call], mixed), framework.call(CALLS[call], floats))


def test_what_comes_back_is_the_same_object():
    for make in (np.array, torch.tensor, jnp.array):
        tree = {"w": make([3.0, 4.0]), "n": make([100]), "m": make([True]), "step": 7, "training": True}
        for clip in (gradclip.clip_by_global_norm, gradclip.clip_by_layer_norm, gradclip.clip_by_unit_norm):
            clipped, _ = clip(tree, 1.0)
            assert all(clipped[name] is tree[name] for name in ("n", "m", "step", "training"))
        assert gradclip.clip_by_value(tree, 1.0)["n"] is tree["n"]


@pytest.mark.parametrize("nonfinite", ["propagate", "zero", "drop"])
def test_policies_are_for_what_counts(framework, nonfinite):
    floats, mixed = trees(framework)
    bad = framework.array([math.nan, 1.0])
    clip = lambda t: gradclip.clip_by_global_norm({**t, "b": bad}, 1.0, nonfinite=nonfinite)[0]
    found = framework.call(clip, mixed)
    assert framework.to_numpy(found["steps"]) == 100
    assert framework.to_numpy(found["mask"]).tolist() == [True, False]
    np.testing.assert_array_equal(framework.to_numpy(found["w"]), framework.to_numpy(framework.call(clip, floats)["w"]))


@pytest.mark.parametrize("integers", [[3, 4], np.array([3, 4]), {"n": torch.tensor(3), "m": jnp.array([True])}, 5])
def test_a_tree_of_integers_alone_is_an_error(integers):
    for call in (*CALLS.values(), lambda t: gradclip.norm_at_most(t, 1.0)):
        with pytest.raises(TypeError, match=r"holds no floating-point numbers, .* (dtype|is [35]).* convert them"):
            call(integers)
    with pytest.warns(UserWarning, match="this part holds no floating-point numbers"):
        assert gradclip.partial_norm(integers).norm == 0.0


def test_python_numbers_count_if_they_are_floats():
    assert float(gradclip.global_norm([3.0, 4, True])) == 3.0
    assert gradclip.clip_by_global_norm([3.0, 4, False], 1.0)[0] == [pytest.approx(1.0), 4, False]


def test_parts_and_exact_checks_leave_integers_out():
    parts = [{"w": np.array([3.0]), "n": np.array([100])}, {"b": np.array([4.0]), "m": np.array([True])}]
    whole = sum(map(gradclip.partial_norm, parts))
    assert whole.norm == 5.0
    clipped = [whole.clip(part, 2.5) for part in parts]
    found = {name: x.tolist() for tree in clipped for name, x in tree.items()}
    assert found == {"w": [pytest.approx(1.5)], "n": [100], "b": [pytest.approx(2.0)], "m": [True]}
    assert gradclip.norm_at_most(parts[0], 3)
    assert not gradclip.norm_at_most(parts[0], 2.999)


IN_PLACE = {
    "clip_grad_norm_": lambda t: gradclip.clip_grad_norm_(t, 1.5),
    "clip_grad_layer_norm_": lambda t: gradclip.clip_grad_layer_norm_(t, 0.7),
    "clip_grad_layer_norm_, some thresholds": lambda t: gradclip.clip_grad_layer_norm_(t, LAYERS),
    "clip_grad_unit_norm_": lambda t: gradclip.clip_grad_unit_norm_(t, 0.7),
    "clip_grad_unit_norm_, some thresholds": lambda t: gradclip.clip_grad_unit_norm_(t, LAYERS),
    "clip_grad_value_": lambda t: gradclip.clip_grad_value_(t, 0.75),
    "adaptive_grad_clip_": lambda t: gradclip.adaptive_grad_clip_(t, 0.1, params=t),
    "grad_norm": gradclip.grad_norm,
}


@pytest.mark.parametrize("call", IN_PLACE)
def test_in_place_in_trees_of_arrays(call):
    floats, mixed = ({name: np.array(x) for name, x in FLOATS.items()} for _ in "12")
    locked = {name: np.array(value, dtype) for name, (dtype, value) in INTEGERS.items()}
    locked["mask"].flags.writeable = False
    mixed = {**locked, **mixed}
    assert same((IN_PLACE[call](mixed), mixed), (IN_PLACE[call](floats), floats))
    assert all(mixed[name] is x for name, x in locked.items())


def test_integers_in_place_of_a_gradient_are_an_error():
    for grad in (np.array([3]), torch.tensor([3]), jnp.array([3])):
        parameters = [SimpleNamespace(grad=np.array([3.0])), SimpleNamespace(grad=grad)][-1:]
        with pytest.raises(TypeError, match=r"parameters\[0\]\.grad has dtype int"):
            gradclip.clip_grad_norm_(parameters, 1.0)
    with pytest.raises(TypeError, match="holds no floating-point numbers"):
        gradclip.clip_grad_norm_({"n": np.array([3])}, 1.0)


def test_thresholds_of_integers_are_not_needed_and_not_in_the_way():
    tree = {"w": np.array([3.0, 4.0]), "n": np.array([100])}
    for max_norm in ({"w": 1.0}, {"w": 1.0, "n": None}, {"w": 1.0, "n": 2.0}):
        clipped, norms = gradclip.clip_by_layer_norm(tree, max_norm)
        assert clipped["w"].tolist() == pytest.approx([0.6, 0.8])
        assert float(norms["w"]) == 5.0
        assert clipped["n"] is tree["n"]
    with pytest.raises(ValueError, match=r"there is no gradient at \['x'\]"):
        gradclip.clip_by_layer_norm(tree, {"w": 1.0, "x": 1.0})
    with pytest.raises(ValueError, match=r"nothing is given for \['w'\]\."):
        gradclip.clip_by_layer_norm(tree, {"n": 1.0})


def test_parameters_of_integers_beside_gradients():
    grads, params = {"w": np.array([3.0, 4.0]), "n": np.array([100])}, {"w": np.array([1.0, 0.0])}
    clipped, norms = gradclip.adaptive_grad_clip(grads, params, clipping=0.5)
    assert (clipped["w"].tolist(), clipped["n"].tolist(), float(norms["n"])) == (pytest.approx([0.3, 0.4]), [100], 0.0)
    with pytest.raises(TypeError, match=r"the parameter of \['w'\] holds integers, but its gradient does not"):
        gradclip.adaptive_grad_clip(grads, {"w": np.array([1, 0]), "n": 3})


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_under_the_transformations_of_torch():
    tree = {"n": torch.tensor([[100], [7]]), "w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}
    clip = lambda t: gradclip.clip_by_global_norm(t, 1.0)
    expected = {"n": tree["n"], "w": torch.tensor([[0.6, 0.8], [0.3, 0.4]])}
    found, norms = torch.func.vmap(clip)(tree)
    compiled, norm = torch.compile(clip, backend="eager", fullgraph=True)({"n": tree["n"][0], "w": tree["w"][0]})
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(norms, torch.tensor([5.0, 0.5]))
    torch.testing.assert_close(compiled, {"n": tree["n"][0], "w": expected["w"][0]})
    assert float(norm) == 5.0


# JAX's `float0`


def with_derivatives_of_integers(wrap=lambda function: function):
    """Return gradients with respect to floats and integers, the latter `float0`, as JAX returns them."""
    loss = lambda p: (p["w"] ** 2).sum() / 2 * p["n"][0]
    return wrap(jax.grad(loss, allow_int=True))({"w": jnp.array([3.0, 4.0]), "n": jnp.array([1, 5])})


@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("call", CALLS)
def test_derivatives_of_integers_are_left_alone(call, wrap):
    grads = with_derivatives_of_integers(wrap)
    zeros = {"n": np.zeros(2, jax.dtypes.float0), "w": grads["w"]}
    for given in (grads, zeros):
        if "some" in call:
            continue
        found, expected = wrap(CALLS[call])(given), wrap(CALLS[call])({"w": grads["w"]})
        for path, x in by_path(expected).items():
            assert by_path(found)[path].tolist() == x.tolist()
    assert jax.tree.structure(wrap(gradclip.clip_by_value)(grads, 1.0)) == jax.tree.structure(grads)


# What other modules ask


def test_leaves_are_chosen_in_one_place():
    tree = {"w": np.array([1.5]), "n": np.array([3]), "f": np.zeros(2, jax.dtypes.float0)}
    flat = counted(tree)
    assert (flat.paths(), [x.tolist() for x in flat.leaves]) == (["['w']"], [[1.5]])
    assert flat.rebuild(["new"])["n"] is tree["n"]
    assert flat.arrange(["norm"], 0.0) == {"w": "norm", "n": 0.0, "f": 0.0}
    assert counted({"f": tree["f"]}).leaves == []
    assert summed({"f": tree["f"], "w": tree["w"]}).rebuild(["sum"])["f"].shape == ()
    with pytest.raises(TypeError, match=r"integers cannot be clipped here: \['n'\] has dtype int64"):
        without_integers(tree)
    assert without_integers({"w": 1.0}) == {"w": 1.0}


def test_libraries_that_count_integers_get_floats():
    assert as_floats([np.array([3], np.int8), torch.tensor([True]), 2, 1.5]) == [3.0, 1.0, 2.0, 1.5]
    dtypes = [as_floats(make([3])).dtype for make in (np.array, torch.tensor, jnp.array)]
    assert dtypes == [np.float64, torch.float32, jnp.float32]


def test_sparse_arrays_of_integers_are_integers():
    mine = jax.experimental.sparse.BCOO((jnp.array([3, 4]), jnp.array([[0], [0]])), shape=(3,))
    tree = {"a": mine, "w": jnp.array([3.0, 4.0]), "z": torch.eye(2, dtype=torch.int64).to_sparse()}
    clipped, norm = gradclip.clip_by_global_norm(tree, 1.0)
    assert (clipped["a"] is mine, clipped["z"] is tree["z"], float(norm)) == (True, True, 5.0)
    with pytest.raises(TypeError, match=r"\['a'\] has dtype int32"):
        without_integers({"a": mine})


def test_arrays_beside_a_counter_are_ordinary(monkeypatch):
    tree = {"w": np.full(4, 3.0, np.float32), "steps": np.int64(7), "b": np.full(2, 2.0)}
    floats = {name: x for name, x in tree.items() if name != "steps"}
    expected, expected_norm = gradclip.clip_by_global_norm(floats, 1.5)
    monkeypatch.setattr("gradclip._src.functional.driver.decide", None)
    found, norm = gradclip.clip_by_global_norm(tree, 1.5)
    assert norm == expected_norm
    assert found["steps"] is tree["steps"]
    assert all((found[name] == expected[name]).all() for name in floats)


STRANGE = {
    "a narrow type": (jnp.ones(3, jnp.float8_e4m3fn), "float8_e4m3fn", "Convert it to one of float16, bfloat16"),
    "of PyTorch": (torch.ones(3).to(torch.float8_e5m2), "float8_e5m2", "Convert it to one of float16, bfloat16"),
    "text": (np.array(["x"]), "str32", "Convert it to one of float16, bfloat16"),
    "a key": (jax.random.key(0), "key<fry>", "It is a key for random numbers, not a gradient: leave it out"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_a_leaf_of_a_dtype_that_cannot_be_clipped_is_named(kind):
    leaf, dtype, advice = STRANGE[kind]
    tree = {"w": torch.ones(3) if isinstance(leaf, torch.Tensor) else np.ones(3), "b": {"c": leaf}}
    clipping = (
        gradclip.clip_by_global_norm,
        gradclip.clip_by_layer_norm,
        gradclip.clip_by_value,
        gradclip.per_example_clip,
    )
    for call in (gradclip.global_norm, *((lambda t, call=call: call(t, 1.0)) for call in clipping)):
        with pytest.raises(TypeError, match=rf"\['b'\]\['c'\] has dtype {dtype}, which cannot be clipped. {advice}"):
            call(tree)
    # Left out by name, it is in nobody's way.
    clipped, norm = gradclip.clip_by_global_norm(tree, 1.0, where=lambda name: name == "w")
    assert float(norm) == pytest.approx(3**0.5)
    assert clipped["b"]["c"] is leaf

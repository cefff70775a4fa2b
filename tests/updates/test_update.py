"""Checks of updates from clients."""

import io
import math
import zipfile
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.flax
import safetensors.numpy
import safetensors.torch
import tensorflow as tf
import torch

import gradclip
from frameworks import ALL, by_name
from gradclip import UpdateCheck, check_update

EAGER = [framework for framework in ALL if not framework.jit]
LIKE = {"w": np.zeros((2, 2), np.float32), "b": np.zeros(1, np.float64), "n": np.array(0)}


def update(**changes):
    arrays = {"w": np.full((2, 2), 2, np.float32), "b": np.array([3.0]), "n": np.array(100)}
    return {name: x for name, x in (arrays | changes).items() if x is not None}


def test_an_honest_update_is_accepted():
    found = check_update(update(), 5.0, like=LIKE)
    assert found
    assert found == UpdateCheck(
        True,
        "The norm 5 is at most 5, and the names, shapes and dtypes of its 3 arrays are those of the template.",
        5.0,
        0.0,
    )


@pytest.mark.parametrize("framework", [f for f in EAGER if "float32" in f.dtypes], ids=by_name)
def test_one_too_large_by_rounding_only_is_refused(framework):
    with framework.mode():
        found = check_update({"w": framework.array([1.0, 1e-5])}, 1)
        tiny = Fraction(float(np.float32(1e-5)))
        assert (found.ok, found.norm) == (False, float(math.sqrt(1 + tiny**2)))
        assert found.excess == pytest.approx(float(tiny**2 / 2), rel=1e-9)
        assert not check_update(framework.array([1.0, 1e-30]), 1, ord=1)
        assert check_update(framework.array([3.0, 4.0]), framework.array(5.0))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"b": np.array([3.0, 0.0])}, "['b'] has shape (2,), not (1,)."),
        ({"b": np.array([3])}, "['b'] has dtype int64, not float64."),
        ({"b": np.float32([3])}, "['b'] has dtype float32, not float64."),
        ({"n": np.array(100.0)}, "['n'] has dtype float64, not int64; the norm 100.124922 is larger than 5 by 95.1; "),
        ({"b": None}, "['b'] is missing."),
        ({"b": None, "w": None}, "2 arrays are missing: ['b'], ['w']."),
        ({"x": np.zeros(1)}, "['x'] is not in the template."),
        ({"b": np.array([np.nan])}, "['b'] holds 1 NaN and 0 infinite of its 1 numbers."),
        ({"w": np.float32([[1, np.inf], [-np.inf, 2]])}, "['w'] holds 0 NaN and 2 infinite of its 4 numbers."),
        (
            {"b": np.array([4.0])},
            "The norm 5.65685425 is larger than 5 by 0.657; norm**2 lies 50% in ['b'], 50% in ['w'].",
        ),
        ({"b": np.array([3.0], object)}, "['b'] has dtype object, not float64; ['b'] has dtype object, which norms do"),
        ({"b": "3.0"}, "['b'] is of type str, not an array; ['b'] is missing."),
    ],
)
def test_what_is_wrong_is_told(changes, reason):
    found = check_update(update(**changes), 5.0, like=LIKE)
    assert not found.ok
    assert found.reason.startswith(reason)
    assert found.reason.endswith(".")
    assert "\n" not in found.reason


@pytest.mark.parametrize(
    "hostile",
    [
        None,
        {},
        [],
        np.array([object()]),
        np.array(["a"]),
        np.array([b"a"]),
        np.array(["2020-01-01"], "M8[s]"),
        np.array([1], "m8[s]"),
        np.zeros(2, [("a", "f4")]),
        np.zeros(2, [("float0", "f8")]),
        np.array([[1.0], [2.0, 3.0]], object),
        np.zeros(0),
        np.arange(3),
        np.longdouble(1),
        [[1.0, [2.0, ["x"]]]],
        {"a\x1b[31m\n": np.array([np.nan])},
        torch.ones(2, device="meta"),
        jax.random.key(0),
        jax.ShapeDtypeStruct((2,), jnp.float32),
        object(),
        lambda: None,
        {"w": {1, 2}},
        [10**400],
        [float("nan")],
        tf.ragged.constant([[1.0], [2.0, 3.0]]),
        tf.constant(["a"]),
    ],
    ids=range(26),
)
@pytest.mark.parametrize("like", [None, LIKE])
def test_hostile_updates_are_refused_without_an_error(hostile, like):
    found = check_update(hostile, 5.0, like=like)
    assert found.ok is False
    assert found.reason.isprintable()
    assert found.reason.endswith(".")


def test_random_changes_of_an_honest_update_are_refused():
    rng = np.random.default_rng(3)
    others = (np.float16, np.float64, np.int32, bool, object, "U3", np.complex64)
    names = [f"layer{i}" for i in range(6)]
    for _ in range(100):
        honest = {name: rng.normal(size=tuple(rng.integers(1, 4, size=2))).astype(np.float32) for name in names}
        like = {name: np.zeros_like(honest[name]) for name in map(str, rng.permutation(names))}
        norm = math.sqrt(math.fsum(float(v) ** 2 for x in honest.values() for v in x.flat))
        assert check_update(honest, norm * (1 + 1e-9), like=like)
        assert not check_update(honest, norm * (1 - 1e-9), like=like)
        name, changed = str(rng.choice(names)), dict(honest)
        match rng.integers(4):
            case 0:
                del changed[name]
            case 1:
                changed[name] = honest[name].astype(others[rng.integers(len(others))])
            case 2:
                changed[name] = honest[name][None]
            case _:
                changed[f"{name}x"] = changed.pop(name)
        found = check_update(changed, 2 * norm, like=like)
        assert not found
        assert name in found.reason


def test_frameworks_compare_by_the_names_of_dtypes():
    ours = {"w": np.float32([3.0, 4.0]), "n": np.int64([1])}
    likes = [
        {"n": torch.tensor([1]), "w": torch.ones(2)},
        {"n": jax.ShapeDtypeStruct((1,), np.int64), "w": jax.ShapeDtypeStruct((2,), jnp.float32)},
        {"n": tf.constant([1], tf.int64), "w": tf.TensorSpec((2,))},
        {name: np.zeros_like(x) for name, x in ours.items()},
    ]
    for like in likes:
        for sent in (ours, {"w": torch.tensor([3.0, 4.0]), "n": torch.tensor([1])}):
            assert check_update(sent, 5, like=like), (sent, like)
        assert not check_update(ours | {"w": torch.ones(2, dtype=torch.bfloat16)}, 5, like=like)


def test_what_libraries_write_and_read(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    sent = model.state_dict()
    assert check_update(sent, 10, like=model.state_dict())
    safetensors.torch.save_file(sent, tmp_path / "a.safetensors")
    for load in (safetensors.torch.load_file, safetensors.numpy.load_file):
        assert check_update(load(tmp_path / "a.safetensors"), 10, like=sent)
    found = check_update(safetensors.flax.load_file(tmp_path / "a.safetensors"), 10, like=sent)
    assert found.reason == "['1.num_batches_tracked'] has dtype int32, not int64."  # JAX in 32-bit mode
    np.savez(tmp_path / "a.npz", **{name: x.numpy() for name, x in sent.items()})
    with np.load(tmp_path / "a.npz") as opened:
        assert check_update(opened, 10, like=sent)
        assert check_update(sent, 10, like=opened)
    arrays = [x.numpy() for x in sent.values()]
    assert check_update(arrays, 10, like=tuple(arrays))
    assert not check_update(arrays[:-1], 10, like=arrays)
    with (
        safetensors.safe_open(tmp_path / "a.safetensors", "np") as file,
        pytest.raises(
            TypeError, match=r"an open file of safetensors\. Pass the arrays: \{name: file\.get_tensor\(name\)"
        ),
    ):
        check_update(file, 10)


def test_what_numpy_does_not_name_is_explained(tmp_path):
    np.savez(tmp_path / "a.npz", w=np.ones(2, jnp.bfloat16))
    with np.load(tmp_path / "a.npz") as opened:
        assert check_update(opened, 10).reason == (
            "['w'] has dtype void16, which norms do not support (NumPy's files keep no names of dtypes that are not "
            "its own, such as bfloat16 and float8: save these as float32, or write safetensors)."
        )
    assert "(" not in check_update(np.ones(2, "V4"), 10).reason


def test_lists_and_names_are_told_apart():
    named = {"w": np.zeros(2), "b": np.zeros(1)}
    listed = list(named.values())
    assert check_update(listed, 1, like=named).reason.endswith(
        "; the update is a list and the template has names, so pass a list as the template, in the same order."
    )
    assert check_update(named, 1, like=listed).reason.endswith(
        "the template is a list and the update has names, so pass a template with names."
    )
    assert "list" not in check_update({"w": np.zeros(2), "c": np.zeros(1)}, 1, like=named).reason
    assert check_update(np.zeros(1), -0.0).reason == "The norm 0 is at most 0."


def test_a_damaged_archive_is_refused():
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as file:
        file.writestr("w.npy", b"junk")
    found = check_update(np.load(io.BytesIO(memory.getvalue())), 1.0)
    assert found.reason.startswith("['w'] cannot be read: ")
    assert math.isnan(found.norm)


def test_integers_are_named_if_there_is_no_template():
    found = check_update(update(), 5.0)
    assert found.reason == (
        "The norm 5 is at most 5; 1 array of integers (['n']) does not count, so pass like= to have dtypes checked."
    )


def test_what_gradclip_clipped_passes():
    rng = np.random.default_rng(0)
    for dtype in (np.float16, np.float32, np.float64):
        for _ in range(50):
            tree = {"w": rng.normal(size=7).astype(dtype)}
            assert check_update(gradclip.clip_by_global_norm(tree, 0.7)[0], 0.7, like=tree)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: check_update("a.npz", 1),
            TypeError,
            r"got 'a.npz' of type str\. Open the file first: numpy\.load\(path",
        ),
        (lambda: check_update(b"a.npz", 1), TypeError, "Or run gradclip check FILE --max-norm C"),
        (lambda: check_update(io.BytesIO(), 1), TypeError, r"safetensors\.numpy\.load_file\(path\)"),
        (
            lambda: check_update(torch.nn.Linear(1, 1).named_parameters(), 1),
            TypeError,
            r"an iterator of type generator, which can be read only once\. Pass dict\(\.\.\.\) of names and arrays",
        ),
        (lambda: check_update(torch.nn.Linear(1, 1), 1), TypeError, r"a model of type Linear\. Pass model\.state_dict"),
        (lambda: check_update(np.ones(1), 1, like="a.npz"), TypeError, "like must be a tree of arrays, got 'a.npz'"),
        (
            lambda: check_update(np.ones(1), 1, like=[object()]),
            TypeError,
            r"nothing but arrays, but \[0\] is of type object",
        ),
        (lambda: check_update(np.ones(1), 1, like={}), ValueError, "like holds no arrays"),
        (lambda: check_update(np.ones(1), 1, like={1: jnp.ones(1), "a": jnp.ones(1)}), TypeError, "which failed"),
        (lambda: check_update(np.ones(1), 1, like=tf.TensorSpec((None,))), TypeError, "a known shape"),
        (lambda: check_update(np.ones(1), -1), ValueError, "must not be negative or NaN"),
        (lambda: check_update(np.ones(1), math.nan), ValueError, "must not be negative or NaN"),
        (lambda: check_update(np.ones(1), "1"), TypeError, "max_norm must be a real number"),
        (lambda: check_update(np.ones(1), None), TypeError, "max_norm must be a real number"),
        (lambda: check_update(np.ones(1), 1, ord=1.5), ValueError, "an integer from 1 to 8, inf or -inf"),
        (
            lambda: check_update(np.ones(1), 1, ord=9),
            ValueError,
            "ord must be an integer from 1 to 8, inf or -inf: .* 9",
        ),
        (lambda: check_update(np.ones(1), 1, ord="fro"), ValueError, "ord must be"),
        (lambda: check_update(["x"], "1"), TypeError, "max_norm must be a real number"),
        (lambda: jax.jit(lambda x: check_update(x, 1.0).ok)(jnp.ones(2)), ValueError, "a traced call does not have"),
        (lambda: jax.jit(lambda c: check_update(np.ones(2), c).ok)(1.0), ValueError, "max_norm is traced"),
        (lambda: torch.func.vmap(lambda x: check_update(x, 1.0).ok)(torch.ones(2, 2)), ValueError, "a traced call"),
        (lambda: check_update(np.ones(1), max_norms=1), TypeError, "unexpected keyword"),
    ],
)
def test_mistakes_of_the_caller_are_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_objects_of_flower_are_named(monkeypatch):
    class Parameters:
        tensors = ()

    Parameters.__module__ = "flwr.common.typing"
    with pytest.raises(
        TypeError, match=r"got Flower's Parameters\. Pass the arrays: flwr\.common\.parameters_to_ndarr"
    ):
        check_update(Parameters(), 1)

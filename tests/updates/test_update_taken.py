"""Whatever a client sends is an array, or a fault in words."""

import io
import struct
import zipfile
from collections import OrderedDict
from types import MappingProxyType

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from gradclip._src.updates.files.source import PIECE
from gradclip._src.updates.update import taken


class Evil:
    @property
    def dtype(self):
        raise RuntimeError("boom")

    def __repr__(self):
        raise RuntimeError("boom")


class Liar(np.ndarray):
    shape = (1,)
    dtype = np.dtype(np.int8)


def archive(**members):
    """Return an open .npz file with these members, as bytes."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return np.load(io.BytesIO(memory.getvalue()), allow_pickle=False)


def npy(values, **changes):
    memory = io.BytesIO()
    np.lib.format.write_array(memory, values)
    content = memory.getvalue()
    for old, new in changes.items():
        content = content.replace(old.encode(), new.encode())
    return content


def fake():
    with FakeTensorMode():
        return torch.ones(3)


def deleted():
    array = jnp.ones(3)
    array.delete()
    return array


def deep(levels):
    tree = np.ones(1)
    for _ in range(levels):
        tree = [tree]
    return tree


def endless():
    tree = []
    tree.append(tree)
    return tree


@pytest.mark.parametrize(
    ("tree", "found"),
    [
        (np.ones((2, 3), np.float32), [("", "float32", (2, 3))]),
        (
            {"b": [np.ones(1), None], "a": (torch.ones(2),)},
            [("['a'][0]", "float32", (2,)), ("['b'][0]", "float64", (1,))],
        ),
        (OrderedDict(b=np.int8(1), a=np.float16(1)), [("['b']", "int8", ()), ("['a']", "float16", ())]),
        ({1: np.ones(1), "a": np.ones(2)}, [("[1]", "float64", (1,)), ("['a']", "float64", (2,))]),
        (
            [1.0, 2, True, 3j],
            [("[0]", "float64", ()), ("[1]", "int64", ()), ("[2]", "bool", ()), ("[3]", "complex128", ())],
        ),
        ({"w": MappingProxyType({"x": np.ones(1)})}, [("['w']['x']", "float64", (1,))]),
        ([np.ones(1), torch.ones(1), jnp.ones(1)], [(f"[{i}]", f"float{32 + 32 * (not i)}", (1,)) for i in range(3)]),
        (tf.ones(2), [("", "float32", (2,))]),
        (torch.ones(3).to_sparse(), [("", "float32", (3,))]),
        (np.ones(2, ml_dtypes.bfloat16), [("", "bfloat16", (2,))]),
        (np.ones(2).view(Liar), [("", "float64", (2,))]),
        (np.ones(2, ">f4"), [("", "float32", (2,))]),
        (np.matrix([[1.0, 2.0]]), [("", "float64", (1, 2))]),
        (None, []),
    ],
    ids=str,
)
def test_arrays_and_their_kinds(tree, found):
    arrays, faults = taken(tree)
    assert [(x.name, x.dtype, x.shape) for x in arrays] == found
    assert faults == []
    for x in arrays:
        assert sum(piece.size for piece in x.pieces()) == np.prod(x.shape)


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: ["a"], "[0] is of type str, not an array"),
        (lambda: {"w": Evil()}, "['w'] is of type Evil, not an array"),
        (lambda: {Evil(): np.ones(1)}, "the update is no tree of arrays: boom"),
        (lambda: np.ma.masked_array([1.0]), "it is a masked array"),
        (lambda: {1: jnp.ones(1), "a": jnp.ones(1)}, "the update is no tree of arrays: "),
        (lambda: deep(100_000), "the update is no tree of arrays: "),
        (lambda: endless(), "the update is no tree of arrays: "),
        (lambda: {"w": MappingProxyType({"x": "a"})}, "['w']['x'] is of type str, not an array"),
        (lambda: [{1, 2}], "[0] is of type set, not an array"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged), "the array cannot be read: "),
    ],
    ids=range(10),
)
def test_what_is_no_array_is_a_fault(make, fault):
    arrays, (said,) = taken(make())
    assert arrays == []
    assert said.startswith(fault)


@pytest.mark.parametrize("make", [fake, deleted, lambda: torch.ones(2, device="meta")])
def test_arrays_without_values_fail_when_they_are_read(make):
    (array,), faults = taken([make()])
    assert faults == []
    with pytest.raises((RuntimeError, ValueError)):
        list(array.pieces())


@pytest.mark.parametrize(
    "array",
    [torch.tensor([1.5, -448.0]).to(torch.float8_e4m3fn), np.array([1.5, -448.0], ml_dtypes.float8_e4m3fn)],
    ids=["torch", "numpy"],
)
def test_float8_is_read_as_the_same_numbers(array):
    (x,), _ = taken(array)
    (piece,) = x.pieces()
    assert x.dtype == "float8_e4m3fn"
    assert piece.data.tolist() == [1.5, -448.0]


def test_an_open_archive_is_read_member_by_member():
    opened = archive(**{"w.npy": npy(np.ones((2, 3))), "n.npy": npy(np.array(3))})
    for tree, before in ((opened, ""), ({"a": opened}, "['a']")):
        arrays, faults = taken(tree)
        assert [(x.name, x.dtype, x.shape) for x in arrays] == [
            (f"{before}['w']", "float64", (2, 3)),
            (f"{before}['n']", "int64", ()),
        ]
        assert faults == []
        (piece,) = arrays[0].pieces()
        assert piece.data.tolist() == [1.0] * 6


@pytest.mark.parametrize("dtype", ["<f4", ">f8", "<c16", "<f2"])
@pytest.mark.parametrize("shape", [(), (0, 3), (900, 1000)])
def test_a_member_is_read_piece_by_piece(dtype, shape):
    values = np.asfortranarray(np.random.default_rng(0).normal(size=shape).astype(dtype))
    (x,), _ = taken(archive(**{"w.npy": npy(values)}))
    pieces = list(x.pieces())
    assert max([piece.data.nbytes for piece in pieces], default=0) <= PIECE
    assert np.array_equal(np.concatenate([[], *(piece.data for piece in pieces)]), values.reshape(-1, order="F"))


def test_members_that_promise_too_much_are_not_allocated():
    promised = npy(np.ones(1000), **{"(1000,)": "(9999999999,)"})
    _, (said,) = taken(archive(**{"w.npy": promised}))
    assert said.startswith("['w'] cannot be read: 'w.npy': its header promises 79999999992 bytes")


@pytest.mark.parametrize(
    "content", [b"", b"junk", b"\x93NUMPY\x09\x00", npy(np.ones(3))[:20], npy(np.ones(3), descr="xxxxx")]
)
def test_damaged_members_are_faults(content):
    arrays, (said,) = taken(archive(**{"w.npy": content}))
    assert arrays == []
    assert said.startswith("['w'] cannot be read: ")


def test_a_member_with_too_many_bytes_is_a_fault_and_a_wrong_sum_fails_when_it_is_read():
    _, (said,) = taken(archive(**{"w.npy": npy(np.ones(3)) + b"x"}))
    assert "promises 24 bytes, but the archive holds 25" in said
    memory = io.BytesIO()
    np.savez(memory, w=np.arange(100_000.0))
    content = memory.getvalue().replace(struct.pack("<d", 99_998), struct.pack("<d", 99_997))
    (changed,), _ = taken(np.load(io.BytesIO(content)))
    with pytest.raises(ValueError, match="CRC"):
        list(changed.pieces())


def test_pickles_are_never_loaded(tmp_path):
    class Harm:
        def __reduce__(self):
            return (tmp_path / "harmed").touch, ()

    np.savez(tmp_path / "w.npz", w=np.array([Harm()], object))
    for allowed in (False, True):
        with np.load(tmp_path / "w.npz", allow_pickle=allowed) as opened:
            _, (said,) = taken(opened)
            assert "it holds Python objects, which are pickled. gradclip reads no pickles: they could run code." in said
    assert not (tmp_path / "harmed").exists()


def test_a_closed_archive_is_a_fault():
    opened = archive(**{"w.npy": npy(np.ones(1))})
    opened.close()
    _, (said,) = taken(opened)
    assert said == "it is an .npz file that was closed"


def test_names_that_occur_twice_in_an_archive_are_kept():
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as file:
        file.writestr("w.npy", npy(np.array(1.0)))
        with pytest.warns(UserWarning, match="Duplicate name"):
            file.writestr("w.npy", npy(np.array(100.0)))
    assert [x.name for x in taken(np.load(io.BytesIO(memory.getvalue()))).arrays] == ["['w']", "['w']"]


def test_lists_that_multiply_are_a_fault():
    tree = [np.ones(1)]
    for _ in range(60):
        tree = [tree, tree]
    _, (said,) = taken({"w": tree})
    assert said == (
        "the update is no tree of arrays: it holds more than 2097152 values, some of them perhaps again and again"
    )


@pytest.mark.parametrize("x", [np.broadcast_to(np.float32(1), (2**20, 2**20)), torch.ones(1).expand(2**40)])
def test_arrays_that_repeat_their_elements_without_end_are_a_fault(x):
    arrays, (said,) = taken({"w": x})
    assert arrays == []
    assert said == "['w'] repeats its elements up to 1,099,511,627,776 numbers, too many to read"
    assert not taken(np.broadcast_to(np.float32(1), 2**20)).faults

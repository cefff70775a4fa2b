import json
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from gradclip._src.updates.files import FileError, open_file
from stored_files import safetensors_bytes, values

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
]
F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DATA = bytes(8)


def random_tree(seed):
    generator = torch.Generator().manual_seed(seed)
    tree = {}
    for number in range(int(torch.randint(0, 9, (), generator=generator))):
        dtype = DTYPES[int(torch.randint(0, len(DTYPES), (), generator=generator))]
        shape = torch.randint(0, 5, (int(torch.randint(0, 4, (), generator=generator)),), generator=generator).tolist()
        tree[f"é{number}.w"] = (torch.randn(shape, generator=generator) * 3).to(dtype)
    return tree


@pytest.mark.parametrize("seed", range(40))
def test_what_the_library_saves_is_read_as_the_library_reads_it(tmp_path, seed):
    path = tmp_path / "a"
    save_file(random_tree(seed), path, {"made": "here"} if seed % 2 else None)
    expected, found = load_file(path), values(path)
    assert found.keys() == expected.keys()
    for name, (dtype, shape, numbers) in found.items():
        assert str(expected[name].dtype) == f"torch.{dtype}"
        assert shape == tuple(expected[name].shape)
        counts = (expected[name].is_floating_point() or expected[name].is_complex()) and "e8m0" not in dtype
        assert (numbers is not None) == counts
        if counts:
            wide = torch.complex128 if expected[name].is_complex() else torch.float64
            np.testing.assert_array_equal(numbers, expected[name].to(wide).reshape(-1).numpy())


def with_entry(**fields):
    return {"w": F32 | fields}


REFUSED = {
    "header beyond the file": b"\0\0\0\1\0\0\0\0{}",
    "header of 2**63 bytes": b"\0\0\0\0\0\0\0\x80{}",
    "no object": safetensors_bytes(b"[]"),
    "a byte too many": safetensors_bytes(with_entry(), DATA + b"x"),
    "cut off": safetensors_bytes(with_entry(), DATA[1:]),
    "shape too small": safetensors_bytes(with_entry(shape=[1]), DATA),
    "unknown dtype": safetensors_bytes(with_entry(dtype="F31"), DATA),
    "negative": safetensors_bytes(with_entry(shape=[-2]), DATA),
    "product overflows": safetensors_bytes(with_entry(shape=[2**32, 2**32], data_offsets=[0, 0])),
    "overflow hidden by 0": safetensors_bytes(with_entry(shape=[2**40, 2**40, 0], data_offsets=[0, 0])),
    "gap": safetensors_bytes(with_entry(data_offsets=[4, 12]), DATA + b"xxxx"),
    "overlap": safetensors_bytes({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, DATA + b"xxxx"),
    "the same place twice": safetensors_bytes({"a": F32, "b": F32}, DATA),
    "entry without shape": safetensors_bytes({"w": {"dtype": "F32", "data_offsets": [0, 0]}}),
    "escapes in a name": safetensors_bytes(with_entry() | {"\x1b[31m": F32}, DATA),
    "deep": safetensors_bytes(b'{"a":' + b"[" * 100_000),
    "invalid UTF-8": safetensors_bytes(b'{"\xff":1}'),
    "empty header": bytes(8),
}


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_files_are_refused_as_the_library_refuses_them(tmp_path, name):
    path = tmp_path / "w.safetensors"
    path.write_bytes(REFUSED[name])
    with pytest.raises(FileError, match=r"safetensors does not read it|its format is unknown") as found:
        values(path)
    assert str(found.value).startswith(str(path))
    assert str(found.value).isprintable()
    with pytest.raises((SafetensorError, RecursionError)), safe_open(path, "pt") as file:
        list(file.keys())


def test_dtypes_that_norms_do_not_support_are_named(tmp_path):
    path = tmp_path / "w"
    path.write_bytes(safetensors_bytes({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"x"))
    with pytest.raises(FileError, match="'w' has the dtype F4, which norms do not support"):
        values(path)


def test_a_header_longer_than_gradclip_reads(tmp_path):
    path = tmp_path / "w"
    path.write_bytes(safetensors_bytes(b"{" + b" " * (1 << 24) + b"}"))
    with pytest.raises(FileError, match=r"its header has 16777218 bytes. gradclip reads at most 16777216"):
        values(path)


def test_unusual_files_that_the_library_accepts(tmp_path):
    path = tmp_path / "w"
    for header, data in (({}, b""), ({"": F32}, DATA), ({"__metadata__": {}, "a": F32 | {"more": [1]}}, DATA)):
        path.write_bytes(safetensors_bytes(json.dumps(header).encode() + b"   ", data))
        assert values(path).keys() == load_file(path).keys()


@pytest.fixture
def sharded(tmp_path):
    save_file({"a": torch.ones(3), "b": torch.zeros(2)}, tmp_path / "1.safetensors")
    save_file({"c": torch.arange(2.0)}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"

    def write(**changes):
        places = {"c": "2.safetensors", "a": "1.safetensors", "b": "1.safetensors"} | changes
        index.write_text(json.dumps({"metadata": {}, "weight_map": {k: v for k, v in places.items() if v}}))
        return index

    return write


def test_shards_are_read_in_the_order_of_the_index(sharded):
    found = values(sharded())
    assert list(found) == ["c", "a", "b"]
    assert found["c"][2].tolist() == [0, 1]


@pytest.mark.parametrize("name", ["../1.safetensors", "/etc/passwd", "a/b", "a\\b", "C:b", "", ".", "..", "a\0b"])
def test_shards_elsewhere_are_refused(sharded, name):
    with pytest.raises(FileError, match="Its files must lie beside the index" if name else "lacks|beside"):
        values(sharded(d=name) if name else empty_name(sharded()))


def empty_name(index):
    index.write_text('{"weight_map": {"d": ""}}')
    return index


def test_shards_that_differ_from_the_index(sharded, tmp_path):
    with pytest.raises(FileError, match=r"2.safetensors: it lacks d, unlike"):
        values(sharded(d="2.safetensors"))
    with pytest.raises(FileError, match=r"1.safetensors: it also has b, unlike"):
        values(sharded(b=None))
    with pytest.raises(FileError, match=r"3.safetensors cannot be opened: No such file"):
        values(sharded(d="3.safetensors"))
    for text in ("{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "b", "a": "b"}}', "{"):
        (tmp_path / "i").write_text(text)
        with pytest.raises(FileError, match=r"weight_map|more than once|damaged"):
            values(tmp_path / "i")


def test_shards_of_checkpoints(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "1.bin")
    torch.save({"b": torch.zeros(2)}, tmp_path / "2.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"b": "2.bin", "a": "1.bin"}}))
    assert [(name, x[2].tolist()) for name, x in values(index).items()] == [("b", [0, 0]), ("a", [1, 1, 1])]


def test_many_small_arrays_take_little_memory(tmp_path):
    count = 10_000
    entry = lambda n: {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]}
    path = tmp_path / "a.safetensors"
    path.write_bytes(safetensors_bytes({f"t{n}": entry(n) for n in range(count)}, bytes(4 * count)))
    tracemalloc.start()
    try:
        with open_file(path) as file:
            assert len(file.arrays) == count
            peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 950 * count

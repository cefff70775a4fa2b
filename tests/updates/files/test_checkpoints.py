import pickle
import zipfile
from collections import Counter, OrderedDict

import numpy as np
import pytest
import torch

from gradclip._src.updates.files import FileError
from stored_files import member, values, zip_bytes

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.pt"


def saved(path, value):
    torch.save(value, path)
    return values(path)


def same(found, tensor):
    """Say whether what was read is the tensor."""
    dtype, shape, numbers = found
    tensor = tensor.detach()
    assert (f"torch.{dtype}", shape) == (str(tensor.dtype), tuple(tensor.shape))
    counts = (tensor.is_floating_point() or tensor.is_complex()) and "e8m0" not in dtype
    assert (numbers is not None) == counts
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return not counts or np.array_equal(numbers, tensor.to(wide).reshape(-1).numpy(), equal_nan=True)


def with_strides(tensor, choice):
    """Return the tensor, transposed, sliced, or expanded."""
    if choice == 1:
        return tensor.transpose(0, -1) if tensor.ndim else tensor
    if choice == 2:
        return tensor[1::2] if tensor.ndim else tensor
    return tensor.unsqueeze(0).expand(3, *tensor.shape) if choice == 3 else tensor


@pytest.mark.parametrize("seed", range(40))
def test_what_torch_saves_is_read_as_torch_reads_it(path, seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = lambda most, *shape: torch.randint(0, most, shape, generator=generator).tolist()
    tree = OrderedDict()
    for number in range(numbers(9)):
        tensor = torch.randn(numbers(5, numbers(4)), generator=generator).to(DTYPES[numbers(len(DTYPES))])
        tree[f"é{number}.w"] = with_strides(tensor, numbers(4))
    tree["again"] = next(iter(tree.values()), torch.ones(1))
    tree._metadata = {"version": 1}
    found = saved(path, tree)
    expected = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    assert list(found) == list(expected)
    assert all(same(found[name], expected[name]) for name in expected)


def test_a_whole_checkpoint(path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    rest = {"epoch": 3, "best": 0.5, "args": {"lr": [1e-3, None, True]}, "size": torch.Size([2])}
    rest |= {"seen": {1, 2}, "z": 1j, "counts": Counter("aab"), "raw": b"x", "dtype": torch.float32}
    rest |= {"mine": bytearray(b"a"), "device": torch.device("cpu")}
    found = saved(path, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **rest})
    assert all(same(found[f"model.{name}"], x) for name, x in model.state_dict().items())
    moments = {f"optimizer.state.{i}.{name}" for i in range(4) for name in ("step", "exp_avg", "exp_avg_sq")}
    assert found.keys() == moments | {f"model.{name}" for name in model.state_dict()}


@pytest.mark.parametrize("value", [torch.arange(3.0), torch.nn.Parameter(torch.arange(3.0))])
def test_a_tensor_alone_and_in_lists(path, value):
    assert saved(path, value)["array"][2].tolist() == [0, 1, 2]
    assert list(saved(path, [value, (value,)])) == ["0", "1.0"]


def test_names_that_would_be_the_same_stay_apart(path):
    one, other = torch.ones(1), torch.zeros(1)
    found = saved(path, {"a": {"b": one}, "a.b": other, 1: one, "1": other})
    assert [(name, x[2].tolist()) for name, x in found.items()] == [
        ("['a']['b']", [1]),
        ("['a.b']", [0]),
        ("[1]", [1]),
        ("['1']", [0]),
    ]


def test_a_model_with_attributes_and_tied_weights(path):
    weight = torch.nn.Parameter(torch.arange(4.0))
    weight.kind = "tied"
    found = saved(path, {"a": weight, "b": weight, "c": weight.detach()[1:3]})
    assert [x[2].tolist() for x in found.values()] == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2]]


def test_empty_tensors_may_start_behind_their_storage(path):
    assert saved(path, {"w": torch.ones(3)[3:], "n": torch.ones(0, 2)})["w"][1] == (0,)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.eye(3).to_sparse(), "'w' is a sparse tensor.*to_dense"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "'w' is a quantized tensor|QInt8"),
        (lambda: torch.empty(2, device="meta"), "'w' is on the device meta"),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), "conjugated or negated"),
        (lambda: torch.nn.Linear(1, 1), r"torch\.nn\.modules\.linear\.Linear, which torch\.load\(weights_only=True\)"),
        (lambda: np.float64(3), "numpy"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_measured_is_refused_by_name(path, make, why):
    torch.save({"w": make()}, path)
    with pytest.raises(FileError, match=why):
        values(path)


def test_keys_that_are_large_numbers(path):
    assert list(saved(path, {2**47 + 8: torch.ones(1)})) == [str(2**47 + 8)]


def test_two_tensors_of_one_name_are_refused(path):
    tree = OrderedDict(w=torch.ones(4))
    tree.w = torch.zeros(4)
    with pytest.raises(FileError, match="two of its tensors have the same keys"):
        saved(path, tree)


@pytest.mark.parametrize("dtype", [torch.bits8, torch.float4_e2m1fn_x2])
def test_dtypes_that_numpy_does_not_know_are_not_measured(path, dtype):
    ((found, _, numbers),) = saved(path, [torch.empty(2, dtype=dtype)]).values()
    assert (f"torch.{found}", numbers) == (str(dtype), None)


def test_what_weights_only_refuses_is_refused(path):
    for value in (torch.nn.Linear(1, 1), np.float64(3), range(3), {"a": print}):
        torch.save(value, path)
        with pytest.raises(pickle.UnpicklingError):
            torch.load(path, weights_only=True)
        with pytest.raises(FileError, match="does not allow"):
            values(path)


def test_files_of_old_versions_and_scripts(path):
    torch.save({"w": torch.ones(1)}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(FileError, match=r"it is a pickle, which could run code.*save it again by torch\.save"):
        values(path)
    path.write_bytes(zip_bytes(member("a/b/data.pkl", b"")))
    with pytest.raises(FileError, match=r"it lacks 'a/data\.pkl'"):
        values(path)
    path.write_bytes(zip_bytes(member("a/data.pkl", b""), member("a/constants.pkl", b"")))
    with pytest.raises(FileError, match="it is a TorchScript archive"):
        values(path)


def changed(path, value, change, **members):
    """Save a value with another pickle, or other members."""
    torch.save(value, path)
    with zipfile.ZipFile(path) as archive:
        data = {x.split("/", 1)[1]: archive.read(x) for x in archive.namelist()}
    data["data.pkl"] = change(data["data.pkl"])
    data |= {name.replace("_", "/"): x for name, x in members.items()}
    path.write_bytes(zip_bytes(*(member(f"a/{name}", x) for name, x in data.items() if x is not None)))
    return path


def test_big_endian_storages_are_refused(path):
    changed(path, torch.zeros(2), lambda x: x, byteorder=b"big")
    with pytest.raises(FileError, match="its numbers are big-endian"):
        values(path)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (b"K\x02\x85", b"K\x09\x85", "storage that is not resizable"),
        (b"K\x02\x85", b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f\x85", "Storage size calculation overflowed"),
        (b"K\x02\x85", b"J\xff\xff\xff\xff\x85", "torch.load does not read it"),
        (b"K\x02\x85", b"G\x40\0\0\0\0\0\0\0\x85", "torch.load does not read it"),
        (b"K\x02\x85", b"K\x01K\x02\x86", "torch.load does not read it"),
        (b"K\x02tq", b"K\x09tq", "promises 9 elements of Float in the storage '0', which has 8 bytes"),
        (b"K\x02tq", b"Ntq", "values of a wrong type"),
        (b"X\x01\0\0\0000", b"X\x01\0\0\0007", "the storage '7' is missing"),
        (
            b"FloatStorage",
            b"FloatStorag_",
            r"torch\.FloatStorag_, which torch\.load\(weights_only=True\) does not allow",
        ),
        (b"storage", b"module_", "something other than a storage"),
        (b"Q", b"", r"torch\.load does not read it"),
        (b"_rebuild_tensor_v2", b"_rebuild_tensor_v3", "torch.load does not read it"),
    ],
)
def test_pickles_that_promise_something_else(path, old, new, why):
    tensor = torch.zeros(2)
    assert old in changed_pickle(path, tensor)
    changed(path, tensor, lambda x: x.replace(old, new, 1))
    with pytest.raises(FileError, match=why) as found:
        values(path)
    assert str(found.value).isprintable()


def changed_pickle(path, value):
    torch.save(value, path)
    with zipfile.ZipFile(path) as archive:
        return archive.read(next(x for x in archive.namelist() if x.endswith("data.pkl")))


def test_missing_storage_and_compressed_ones(path):
    changed(path, torch.zeros(2), lambda x: x, data_0=None)
    with pytest.raises(FileError, match="the storage '0' is missing"):
        values(path)


def test_values_that_multiply_are_refused(path):
    with pytest.raises(FileError, match="to read its tensors takes 4398046511104 bytes"):
        saved(path, torch.zeros(1).expand(2**40))
    nested = [torch.zeros(1)]
    for _ in range(40):
        nested = [nested, nested]
    with pytest.raises(FileError, match="nested too deeply, or holds too many values"):
        saved(path, nested)
    numbers = [1] * 200_000
    with pytest.raises(FileError, match="nested too deeply, or holds too many values"):
        saved(path, [numbers] * 100_000)
    circle = []
    circle.append(circle)
    with pytest.raises(FileError, match="nested too deeply"):
        saved(path, circle)
    with pytest.raises(FileError, match="keys that are neither text nor numbers"):
        saved(path, {(1, 2): torch.ones(1)})


def test_elements_that_lie_apart_many_times_over_are_refused(path):
    far = torch.ones(24 * 2**14 + 1).as_strided((2,) * 24, (2**14,) * 24)
    with pytest.raises(FileError, match="they share or repeat storages, or lie apart"):
        saved(path, far)

"""The fast path and the portable path on the same data, for every dtype, and float32-only devices."""

import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from array_api_compat import torch as namespace

from frameworks import DTYPES, numpy_dtype
from gradclip.backends.formats import FLOAT32
from gradclip.backends.host.arrays import HostArray, wide_chunks
from gradclip.backends.host.backend import HOST
from gradclip.backends.host.in_place import scale_
from gradclip.backends.jax.host import JaxHost
from gradclip.backends.sums import halving_sum
from gradclip.backends.torch.choose import Torch, TorchHost
from gradclip.core.coefficient import coefficient
from gradclip.core.norms import Norm, Order, measure
from gradclip.core.scopes import TREE

SIZES = (0, 1, 15, 16, 17, 32767, 32769, 65537)
ORDERS = (1.0, 1.5, 2.0, 3.0, math.inf, -math.inf)


def tensors(dtype, size, scale=1.0):
    rng = np.random.default_rng(size)
    x = rng.normal(size=size) * scale
    values = x + 1j * x[::-1] if "complex" in dtype else x
    if dtype == "bfloat16":
        return torch.from_numpy(values).to(torch.bfloat16)
    return torch.from_numpy(values.astype(numpy_dtype(dtype)))


class NarrowDevice(Torch):
    """CPU tensors standing for a device without float64."""

    def __init__(self):
        super().__init__(torch.device("cpu"), visible=True)
        self.wide = FLOAT32


def on(backend, tensor, order):
    with backend.precision():
        return measure(backend, backend.enter([backend.prepare(tensor)]), Order(order))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("order", ORDERS)
def test_norms_agree(dtype, size, order):
    tensor = tensors(dtype, size)
    fast = on(TorchHost(), tensor, order)
    portable = on(Torch(torch.device("cpu"), visible=True), tensor, order)
    assert float(portable.product()) == pytest.approx(float(fast.product()), rel=2 * fast.error + 1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_shrunk_arrays_are_the_same_bits(dtype, size):
    tensor = tensors(dtype, size, 2.0)
    fast, portable = TorchHost(), Torch(torch.device("cpu"), visible=True)
    norm = on(fast, tensor, 2.0)
    with np.errstate(all="ignore"):
        chosen = coefficient(fast, norm, np.float64(0.25), split=dtype in ("float64", "complex128"))
    with portable.precision():
        portable_norm = Norm(torch.as_tensor(norm.value), None, norm.error, norm.floor)
        threshold = torch.tensor(0.25, dtype=torch.float64)
        as_tensors = coefficient(portable, portable_norm, threshold, split=dtype in ("float64", "complex128"))
    assert bool(as_tensors.keep) == bool(chosen.keep)
    assert chosen.keep or float(as_tensors.wide.first) == chosen.wide.first
    one = fast.leave(fast.shrink(fast.enter([tensor]), chosen, TREE)[0], tensor)
    other = portable.shrunk(tensor, as_tensors, TREE)
    assert one.view(torch.uint8 if size else one.dtype).equal(other.view(torch.uint8 if size else other.dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-5, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("size", [1, 16, 17, 4097])
def test_devices_without_float64_keep_error_and_bound(dtype, scale, size):
    if dtype == "float16" and not 1e-6 < scale < 1e6:
        scale = 1.0
    tensor = tensors(dtype, size, scale)
    exact = on(TorchHost(), tensor, 2.0)
    device = NarrowDevice()
    norm = on(device, tensor, 2.0)
    true = float(exact.product())
    assert float(norm.product()) == pytest.approx(true, rel=min(norm.error, 1e-6), abs=2.0**-126)
    threshold = torch.tensor(true / 3, dtype=torch.float32)
    with device.precision():
        chosen = coefficient(device, norm, threshold, split=True)
        clipped = device.shrunk(tensor, chosen, TREE)
    after = float(on(TorchHost(), clipped, 2.0).product())
    assert after <= float(threshold)
    if float(threshold) > 1e-30 and dtype in ("float32", "complex64"):
        assert after >= (1 - 1e-5) * float(threshold)


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        *[((1,), (0,)), ((2,), (0,)), ((5,), (0,)), ((4, 7), (1,)), ((4, 7), (0, 1)), ((3, 5, 2), (1, 2))],
        *[((4, 0), (1,)), ((0, 3), (1,)), ((0,), (0,)), ((), ())],
    ],
)
def test_halving_sum(shape, axes):
    terms = torch.arange(float(math.prod(shape))).reshape(shape)
    assert halving_sum(namespace, terms, axes).tolist() == terms.sum(axes).tolist()


@pytest.mark.parametrize("layout", ["C", "F", "strided", "reversed", "broadcast"])
def test_host_arrays_of_any_layout(layout):
    base = np.arange(1.0, 181.0).reshape(12, 15).astype(np.float32)
    x = {
        "C": base,
        "F": np.asfortranarray(base),
        "strided": base[::2, 1::3],
        "reversed": base[::-1, ::-1],
        "broadcast": np.broadcast_to(base[0], (4, 15)),
    }[layout]
    norm = measure(HOST, HOST.enter([x]), Order(2.0))
    assert float(norm.value) == pytest.approx(np.sqrt(np.sum(x.astype(np.float64) ** 2)), rel=1e-14)
    chosen = coefficient(HOST, norm, np.float64(1.0), split=False)
    shrunk = HOST.shrink(HOST.enter([x]), chosen, TREE)[0].data
    np.testing.assert_allclose(shrunk, x.astype(np.float64) / float(norm.value), rtol=2.0**-23)
    if layout != "broadcast":
        scale_(HOST.enter([x]), chosen, TREE, threads=1)
        assert np.array_equal(x, shrunk)


def test_bfloat16_is_held_as_bits():
    x = HostArray.of(np.array([1.5, -2.0], ml_dtypes.bfloat16))
    assert x.data.dtype == np.uint16
    assert [chunk.tolist() for chunk in wide_chunks(x)] == [[1.5, -2.0]]


def test_jax_takes_the_memory_of_eager_results_over():
    x = jnp.arange(1.0, 100_001.0)
    backend = JaxHost()
    norm = measure(backend, backend.enter([x]), Order(2.0))
    (result,) = backend.shrink(backend.enter([x]), coefficient(backend, norm, np.float64(1.0), split=False), TREE)
    assert backend.leave(result, x).unsafe_buffer_pointer() == result.data.ctypes.data

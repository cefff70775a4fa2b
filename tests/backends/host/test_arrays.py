"""Arrays of any layout in host memory, and what they hold for dtypes that NumPy lacks."""

import ml_dtypes
import numpy as np
import pytest

from gradclip._src.backends.host.arrays import HostArray, wide_chunks
from gradclip._src.backends.host.backend import HOST
from gradclip._src.backends.host.laid import scale_
from gradclip._src.core.coefficient import coefficient
from gradclip._src.core.layouts import TREE
from gradclip._src.core.norms import Order


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
    norm = HOST.norms(HOST.enter([x]), Order(2.0))
    assert float(norm.value) == pytest.approx(np.sqrt(np.sum(x.astype(np.float64) ** 2)), rel=1e-14)
    chosen = coefficient(HOST, norm, np.float64(1.0), split=False)
    shrunk = HOST.scale(HOST.enter([x]), chosen, TREE)[0].data
    np.testing.assert_allclose(shrunk, x.astype(np.float64) / float(norm.value), rtol=2.0**-22)
    if layout != "broadcast":
        scale_(HOST.enter([x]), chosen, TREE, threads=1)
        assert np.array_equal(x, shrunk)


def test_bfloat16_is_held_as_bits():
    x = HostArray.of(np.array([1.5, -2.0], ml_dtypes.bfloat16))
    assert x.data.dtype == np.uint16
    assert [chunk.tolist() for chunk in wide_chunks(x)] == [[1.5, -2.0]]

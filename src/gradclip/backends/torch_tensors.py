"""Where a tensor's values lie: dense, sparse or conjugated, as NumPy's views and as the kernels know them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gradclip import native
from gradclip.backends import whole_scalar
from gradclip.backends.arrays import checked_dtype
from gradclip.backends.formats import BFLOAT16, dtype_name
from gradclip.backends.host import HostArray


def described(tensors: Sequence[Any]) -> native.Described:
    """Describe CPU tensors to the kernels; those of conjugates and the like as they lie in memory."""
    exchange_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange_api is not None:
        return native.describe_tensors(tensors, exchange_api)
    dense = [t.layout is torch.strided and not t.is_conj() and not t.is_neg() for t in tensors]
    empty = np.empty(0, np.int8)
    return native.describe_buffers([viewed(t).data if d else empty for t, d in zip(tensors, dense, strict=True)])


def stored(leaf: torch.Tensor) -> torch.Tensor:
    """Return the dense tensor that shares a gradient's memory."""
    return leaf if leaf.layout is torch.strided else stored_values(leaf)


def writable(tensor: torch.Tensor) -> bool:
    """Say whether each element of a gradient has a place of its own that can be written."""
    if tensor.layout is torch.sparse_coo:
        return tensor.is_coalesced()
    if tensor.layout is not torch.strided:
        return True
    expanded = any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return not (expanded or tensor.is_conj() or tensor.is_neg())


def prepared(leaf: Any) -> torch.Tensor:
    """Return the dense tensor that holds a leaf's values, integers promoted to the default dtype."""
    tensor = leaf if isinstance(leaf, torch.Tensor) else torch.as_tensor(leaf)
    if tensor.layout is not torch.strided:
        tensor = stored_values(tensor)
    if not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype is not torch.bool:
        tensor = tensor.to(torch.get_default_dtype())
    return checked_dtype(tensor)


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor, those of one position summed."""
    return tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()


def restored(values: torch.Tensor, leaf: Any) -> torch.Tensor:
    """Return `values` in the sparse layout of `leaf`, or as they are where that is dense."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is torch.strided:
        return values
    if leaf.layout is torch.sparse_coo:
        indices = leaf.coalesce().indices()
        return torch.sparse_coo_tensor(indices, values, leaf.shape, is_coalesced=True, check_invariants=False)
    rows = leaf.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed = leaf.crow_indices() if rows else leaf.ccol_indices()
    plain = leaf.col_indices() if rows else leaf.row_indices()
    return torch.sparse_compressed_tensor(
        compressed, plain, values, leaf.shape, layout=leaf.layout, check_invariants=False
    )


def viewed(tensor: torch.Tensor) -> HostArray:
    """Return a view of a CPU tensor's memory."""
    name = dtype_name(tensor)
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if name == BFLOAT16.name:
        return HostArray(tensor.view(torch.int16).numpy().view(np.uint16), name)
    return HostArray(tensor.numpy(), name)


def on_host(leaf: Any) -> HostArray:
    """Return a view of a tensor's values in host memory, copied there if they lie elsewhere."""
    tensor = whole_scalar(leaf).detach()
    return viewed((tensor if tensor.layout is torch.strided else stored_values(tensor)).cpu())


def unviewed(array: HostArray) -> torch.Tensor:
    """Return the tensor that shares memory with `array`."""
    if array.dtype == BFLOAT16.name:
        return torch.from_numpy(array.data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.data)

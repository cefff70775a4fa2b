"""The memory of PyTorch tensors: dense, sparse or conjugated, as NumPy views and as described to the kernels."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from gradclip._src import native
from gradclip._src.backends import whole_scalar
from gradclip._src.backends.host.arrays import HostArray
from gradclip._src.core.arrays import checked_dtype
from gradclip._src.core.formats import BFLOAT16, bare_name, dtype_name
from gradclip._src.core.memory import Region, meeting

# Subclasses may redefine operations, so the contents of their memory need not be their values.
PLAIN = {torch.Tensor, torch.nn.Parameter}
KNOWN = PLAIN | {FakeTensor}
# Names are kept before anything is compiled: PyTorch 2.11 cannot compile code that keeps one.
for _dtype in [one for one in vars(torch).values() if isinstance(one, torch.dtype)]:
    bare_name(_dtype)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def described(tensors: Sequence[Any]) -> native.Described:
    """Describe CPU tensors to the kernels by their memory. For a conjugated tensor, that is its original."""
    if native.kernels is None:
        return native.Described(None, range(len(tensors)))
    # Only newer PyTorch versions have this table, which lets C++ read tensors without a Python call for each.
    exchange_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if exchange_api is not None:
        return native.Described(*native.kernels.describe_tensors(list(tensors), exchange_api))
    dense = [t.layout is torch.strided and not t.is_conj() and not t.is_neg() for t in tensors]
    # A placeholder for tensors that NumPy cannot view. The kernels do not support its dtype, so they leave it out.
    empty = np.empty(0, np.int8)
    return native.describe_buffers([viewed(t).data if d else empty for t, d in zip(tensors, dense, strict=True)])


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor on a device, copied asynchronously. The host must not read it before the copy is complete."""
    if device.type == "cuda" and x.device.type == "cpu" and torch.cuda.is_available():
        x = x.pin_memory()  # copies of other memory wait
    return x.to(device, non_blocking=device.type != "cpu")


def stored(leaf: torch.Tensor) -> torch.Tensor:
    """Return the dense tensor that shares a gradient's memory."""
    if leaf.layout is not torch.strided:
        return stored_values(leaf)
    if leaf.is_nested:
        raise _unknown("nested", "a list of its parts, x.unbind(), or one padded tensor, x.to_padded_tensor(0.0)")
    return leaf


def _unknown(kind: str, instead: str) -> TypeError:
    return TypeError(f"a {kind} tensor cannot be clipped. Pass {instead}.")


def _quantized() -> TypeError:
    return _unknown("quantized", "its numbers, x.dequantize()")


def with_memory(tensor: torch.Tensor, name: Callable[[], str] = lambda: "a gradient") -> torch.Tensor:
    """Return a CPU tensor. Raises ValueError if it has elements but no memory."""
    if tensor.untyped_storage().nbytes() or not tensor.numel():
        return tensor
    raise ValueError(
        f"{name()}, of shape {tuple(tensor.shape)}, has no memory behind it: its storage has been freed (0 bytes), as "
        "sharded training does between steps. Pass the tensors that hold the values."
    )


def region(tensor: torch.Tensor) -> Region | None:
    """Return a gradient's memory region, or None if it has no memory of its own."""
    # Its values are sums of the stored entries, and get new memory.
    if tensor.layout is torch.sparse_coo and not tensor.is_coalesced():
        return None
    lying = stored(tensor)
    # PyTorch counts strides in elements, a region in bytes.
    size = lying.element_size()
    address = _start(lying) + size * lying.storage_offset()
    return Region.of(address, size, lying.shape, [size * step for step in lying.stride()])


def _start(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; without values, one as if its storage had memory."""
    storage = tensor.untyped_storage()
    return storage._cdata << 64 if without_values(tensor) else storage.data_ptr()


def without_values(tensor: torch.Tensor) -> bool:
    """Say whether a tensor stands for one that is never computed: it is on "meta", or made in a `FakeTensorMode`."""
    return tensor.is_meta or type(tensor) is FakeTensor


def meeting_when_compiled(*owners: Any) -> tuple[tuple[int, ...], ...]:
    """Return the indices of gradients that share memory when code is compiled, a tuple for each set."""
    grads = [getattr(owner, "grad", None) for owner in owners]
    return tuple(map(tuple, meeting([region(grad) if type(grad) in KNOWN else None for grad in grads])))


# Compiled code cannot look at memory. The compiler calls this function with the parameters, whose gradients are those
# of the call that it compiles. That is `torch.compiler.assume_constant_result`, which would import the compiler.
meeting_when_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def stretch(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the start and end of a gradient's storage, or zeros if it has none of its own."""
    if tensor._is_zerotensor() or (tensor.layout is torch.sparse_coo and not tensor.is_coalesced()):
        return 0, 0
    storage = stored(tensor).untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def writable(tensor: torch.Tensor) -> bool:
    """Say whether each element of a gradient has its own writable place in memory."""
    if tensor.layout is torch.sparse_coo:
        return tensor.is_coalesced()
    if tensor.layout is not torch.strided:
        return True
    if not tensor.is_contiguous() and _may_meet_itself(tensor):
        return False
    # Compiled code cannot check the rest, and never gets such tensors.
    return torch.compiler.is_compiling() or not (tensor._is_zerotensor() or tensor.is_conj() or tensor.is_neg())


def _may_meet_itself(tensor: torch.Tensor) -> bool:
    """Say whether elements of a tensor share a place in memory. True in case of doubt."""
    if torch.compiler.is_compiling():
        # Compilers cannot sort strides, and fail at `tensor.stride()` of a transposed gradient.
        steps = torch.ops.aten.sym_stride(tensor)
        return any(count > 1 and step == 0 for count, step in zip(tensor.shape, steps, strict=True))
    reach = 0  # of the axes with smaller steps
    for step, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if count > 1:
            if step <= reach:
                return True
            reach += step * (count - 1)
    return False


def put(leaf: torch.Tensor, x: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Write the result into the gradient `leaf`, through its array `x`, or return a replacement."""
    if not writable(leaf):
        return restored(result, leaf)
    x.copy_(result)
    return leaf


def put_all(
    leaves: Sequence[torch.Tensor], arrays: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """Write the results into the gradients `leaves`, through their `arrays`. Return them or replacements."""
    if not all(map(writable, leaves)):
        return [put(leaf, x, y) for leaf, x, y in zip(leaves, arrays, results, strict=True)]
    if leaves:
        torch._foreach_copy_(list(arrays), list(results))
    return leaves


def write_back(leaf: torch.Tensor, copy: torch.Tensor) -> None:
    """Write the values of a copy into its gradient."""
    torch._foreach_copy_([stored(leaf.detach())], [stored(copy)])


def tensor_of(values: object) -> torch.Tensor:
    """Return a tensor unchanged, and other values as a CPU tensor, whatever PyTorch's default device is."""
    return values if isinstance(values, torch.Tensor) else torch.as_tensor(values, device="cpu")


def dense(leaf: object) -> torch.Tensor:
    """Return the dense tensor with a leaf's values. A number becomes a CPU tensor."""
    if not isinstance(leaf, torch.Tensor):
        wide = default_float()
        dtype = wide.to_complex() if isinstance(leaf, complex) else wide
        return torch.tensor(leaf, dtype=dtype, device="cpu")
    return stored(leaf)


def floating(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor. Raises TypeError if its dtype is not supported for gradients."""
    if not tensor.is_floating_point() and tensor.is_quantized:
        raise _quantized()
    return checked_dtype(tensor)


def default_float() -> torch.dtype:
    """Return the default dtype, but at least float32: numbers would overflow in a narrower dtype."""
    return torch.float64 if torch.get_default_dtype() is torch.float64 else torch.float32


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor, with entries for the same position summed.

    Sums are rounded once, from float64. Half types become float32, where the sum of their entries fits.
    """
    if tensor.layout is torch.sparse_coo:
        whole = not (tensor.is_floating_point() or tensor.is_complex())
        if whole or tensor.is_coalesced():
            return tensor.coalesce().values()
        # MPS has no float64.
        wide = torch.promote_types(tensor.dtype, torch.float32 if tensor.device.type == "mps" else torch.float64)
        return tensor.to(wide).coalesce().values().to(torch.promote_types(tensor.dtype, torch.float32))
    if tensor.layout in _COMPRESSED:
        return tensor.values()
    if tensor.is_nested:
        raise _unknown("nested", "its values, x.values(), or a list of its parts, x.unbind()")
    raise _unknown(str(tensor.layout).removeprefix("torch.").lstrip("_"), "a dense one, x.to_dense()")


def restored(values: torch.Tensor, leaf: object) -> torch.Tensor:
    """Return `values` in the sparse layout of `leaf`, or unchanged if `leaf` is dense.

    If they are the sums of its entries, the entries stay as they are.
    """
    if not isinstance(leaf, torch.Tensor) or leaf.layout is torch.strided:
        return values
    if leaf.layout is torch.sparse_coo:
        if not leaf.is_coalesced():
            if torch.equal(stored_values(leaf), values):
                return leaf.clone()
            values = _toward_zero(values, leaf.dtype)
        indices = leaf.coalesce().indices()
        # These indices were already checked. Checking again would wait for a device.
        return torch.sparse_coo_tensor(
            indices, values, leaf.shape, device=values.device, is_coalesced=True, check_invariants=False
        )
    rows = leaf.layout in (torch.sparse_csr, torch.sparse_bsr)
    compressed = leaf.crow_indices() if rows else leaf.ccol_indices()
    plain = leaf.col_indices() if rows else leaf.row_indices()
    return torch.sparse_compressed_tensor(
        compressed, plain, values, leaf.shape, layout=leaf.layout, device=values.device, check_invariants=False
    )


def _toward_zero(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the values in a narrower type or the same. The largest number takes the place of larger ones."""
    if values.dtype == dtype:
        return values
    largest = torch.finfo(dtype).max
    nearest = values.clamp(-largest, largest).to(dtype)
    nearer = (nearest.view(torch.int16) - 1).view(dtype)
    # Written as a sum, so that the derivative passes.
    correction = torch.where(nearest.abs() > values.abs(), nearer - nearest, 0.0).detach()
    return nearest + correction


def viewed(tensor: torch.Tensor) -> HostArray:
    """Return a view of a CPU tensor's memory. For a zero tensor without memory, return new zeros."""
    name = dtype_name(tensor)
    with_memory(tensor)
    if tensor._is_zerotensor():
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    # NumPy does not accept tensors that require gradients.
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if name == BFLOAT16.name:
        # NumPy has no bfloat16, so it gets the bits as integers.
        return HostArray(tensor.view(torch.int16).numpy().view(np.uint16), name)
    return HostArray(tensor.numpy(), name)


def on_host(leaf: object) -> HostArray:
    """Return a view of a tensor's values in host memory, copied there if they are elsewhere."""
    tensor = stored(whole_scalar(leaf).detach())
    if tensor.is_quantized:
        raise _quantized()
    if tensor.is_meta:
        raise ValueError("a tensor on the meta device holds no values. Pass the tensors that hold them.")
    return viewed(tensor.cpu())


def numbers(leaves: Sequence[Any]) -> list[np.ndarray]:
    """Return the numbers in tensors as flat float64 arrays, with one copy for each device and dtype."""
    tensors = [stored(whole_scalar(leaf).detach()) for leaf in leaves]
    kinds: dict[Any, list[int]] = {}
    for index, x in enumerate(tensors):
        kinds.setdefault((x.device, x.dtype), []).append(index)
    found: dict[int, np.ndarray] = {}
    for indices in kinds.values():
        some = [tensors[index].reshape(-1) for index in indices]
        together = on_host(torch.cat(some) if len(some) > 1 else some[0]).numbers()
        ends = np.cumsum([len(x) for x in some])
        found.update(zip(indices, np.split(together, ends[:-1]), strict=True))
    return [found[index] for index in range(len(tensors))]


def unviewed(array: HostArray) -> torch.Tensor:
    """Return the tensor that shares memory with `array`."""
    if array.dtype == BFLOAT16.name:
        return torch.from_numpy(array.data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.data)


def not_above(value: torch.Tensor) -> torch.Tensor:
    """Convert float64 numbers to float32, rounded toward zero: a threshold must never be rounded up."""
    nearest = value.to(torch.float32)
    return torch.where(nearest.abs() > value.abs(), torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)

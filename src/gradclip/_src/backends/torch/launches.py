"""Launch the kernels of `gpu_kernels`: where they run, the tables that they read, and what is kept between calls.

A table depends on the tensors' sizes and dtypes only, so it is made once. What changes at a call are the addresses: one
number for each tensor, copied to the device without waiting, and only if they differ from those of the last call.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import threading
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch

from gradclip._src import native
from gradclip._src.backends import gpu_switch
from gradclip._src.backends.torch.tensors import sent
from gradclip._src.core.coefficient import NARROW_LOWERED
from gradclip._src.core.formats import FLOAT64
from gradclip._src.core.norms import Order, relative_error
from gradclip._src.core.rules import LOWERED

ORDERS = {1.0: 1, 2.0: 2, math.inf: 0}
KEEP, BLANK = 0.0, -1.0
"""What the second factor says where elements are not multiplied."""
TOWARD_ZERO, NEAREST, NEAREST_BUT_FLOAT16 = 0, 1, 2
"""How products are rounded to half types."""
# As in `describe_on_device` of the native kernels.
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SIZES = (4, 2, 2)
_MOST_TABLES = 32


def kernels() -> ModuleType | None:
    """Return the kernels; None if they are switched off or cannot run here."""
    # Nobody has tried them on AMD's GPUs yet.
    return _imported() if gpu_switch.wanted(default=torch.version.hip is None) else None


@lru_cache(maxsize=1)
def _imported() -> ModuleType | None:
    why = gpu_switch.lacking()
    if not why:
        try:
            return importlib.import_module("gradclip._src.backends.torch.gpu_kernels")
        except ImportError as error:
            why = f"Triton cannot be imported ({error})"
    _warn(why)
    return None


def _warn(why: str) -> None:
    text = (
        f"gradclip runs without its kernels for GPUs: {why}. Set {gpu_switch.VARIABLE}=0 to run without them silently."
    )
    warnings.warn(text, stacklevel=2)


class TensorDescriptors(NamedTuple):
    """Tensors of one device that the kernels can read: where each lies, how many elements it has, and its dtype."""

    device: torch.device
    addresses: Sequence[int]
    counts: Sequence[int]
    kinds: Sequence[int]
    apart: bool
    """Whether no two of them share memory."""


def described(tensors: Sequence[torch.Tensor]) -> TensorDescriptors | None:
    """Describe tensors to the kernels; None if one is not dense, of another dtype, or on another device."""
    device = tensors[0].device
    exchange_api = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if any(map(torch.Tensor.is_neg, tensors)):  # the memory holds other numbers
        return None
    if native.kernels is not None and exchange_api is not None:
        place = map(int, tensors[0].__dlpack_device__())
        found = native.kernels.describe_on_device(list(tensors), exchange_api, *place)
        return None if found is None else TensorDescriptors(device, *found)
    kinds = [_KINDS.get(x.dtype, -1) for x in tensors]
    if -1 in kinds or any(x.device != device for x in tensors) or not all(map(_is_dense, tensors)):
        return None
    counts, addresses = [x.numel() for x in tensors], [x.data_ptr() for x in tensors]
    if any(count and not address for count, address in zip(counts, addresses, strict=True)):  # without memory
        return None
    return TensorDescriptors(device, addresses, counts, kinds, _apart(*map(tuple, (addresses, counts, kinds))))


def _is_dense(x: torch.Tensor) -> bool:
    """Say whether a tensor fills a stretch of memory, each place once."""
    return x.layout is torch.strided and (x.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(x))


@lru_cache(maxsize=8)  # mostly that of the last call
def _apart(addresses: tuple[int, ...], counts: tuple[int, ...], kinds: tuple[int, ...]) -> bool:
    each = zip(addresses, counts, kinds, strict=True)
    stretches = sorted((start, start + count * _SIZES[kind]) for start, count, kind in each if count)
    return all(end <= start for (_, end), (start, _) in pairwise(stretches))


class LaunchTable:
    """What the kernels know of the tensors of a call, on a device and stream, with room for what they write."""

    def __init__(self, found: TensorDescriptors, part_of: Sequence[int] | None, parts: int) -> None:
        rows, owner = _rows(found, part_of)
        starts, whole = np.searchsorted(owner, np.arange(parts + 1)), np.array([0, len(rows)])
        self.device, self.parts, self.rows = found.device, parts, len(rows)
        self._largest_part = int(np.diff(starts).max(initial=0))
        self._chunks, self._starts, self._whole, self._part_of = (
            sent(torch.from_numpy(x), found.device) for x in (rows, starts, whole, owner)
        )
        room = max(1, self.rows)
        self._partial = torch.empty(room, dtype=torch.float64, device=found.device)
        self._flags = torch.empty(room, dtype=torch.int32, device=found.device)
        self._factors = torch.empty(2 * parts, dtype=torch.float32, device=found.device)
        self._sources, self._targets = (_Kept(found.device, torch.int64) for _ in range(2))
        self._limits = _Kept(found.device, torch.float64)

    def measure(self, addresses: Sequence[int], order: Order, *, zero: bool = False) -> None:
        """Launch the sums."""
        given = self._chunks, self._sources.put(addresses), self._partial, self._flags
        launch("sums", self.rows, self.device, given, (ORDERS[order.p], zero, _module().BLOCK))

    def decide(
        self,
        max_norm: Any,
        order: Order,
        *,
        joint: bool = False,
        skip: bool = False,
        whole: bool = False,
        dtype: torch.dtype = torch.float32,
        shown: torch.Tensor | None = None,
        times: float = 1.0,
    ) -> torch.Tensor:
        """Launch the decision; return the norms as a vector, with `joint` followed by the norm of all parts.

        The threshold is a number, a list of numbers, one for each part, or a scalar on the device. With `whole`, all
        parts count as one. To three int8 numbers `shown` it writes what the kernel says of the norm.
        """
        module, parts = _module(), 1 if whole else self.parts
        norms = torch.empty(parts + joint, dtype=dtype, device=self.device)
        limits, step, number = self._partial, -1, 0.0
        if isinstance(max_norm, torch.Tensor):
            limits, step = max_norm, 0
        elif isinstance(max_norm, float | int):
            number = float(max_norm)
        else:
            limits, step = self._limits.put(max_norm), 1
        additions = module.additions(self.rows if joint or whole else self._largest_part)
        error = relative_error(order, additions * FLOAT64.roundoff, FLOAT64, exact=order.extreme)
        starts, inflate = self._whole if whole else self._starts, 1.0 / (1.0 - error)
        show, told = shown is not None, self._flags if shown is None else shown
        given = self._partial, starts, norms, self._factors, limits, told, number, inflate, times, parts
        known = ORDERS[order.p], step, show, joint, skip, LOWERED, NARROW_LOWERED, module.BLOCK
        launch("decide", parts, self.device, given, known)
        return norms

    def scale(
        self,
        sources: Sequence[int],
        targets: Sequence[int] | None = None,
        *,
        factors: torch.Tensor | None = None,
        rounding: int = TOWARD_ZERO,
        whole: bool = False,
        zero: bool = False,
    ) -> None:
        """Launch the products: in place, or written to other addresses.

        The factors are those of the last decision, `whole` as there; or two float32 numbers for each part.
        """
        own = self._sources.put(sources)
        other = own if targets is None else self._targets.put(targets)
        factors = self._factors if factors is None else factors
        given = self._chunks, self._part_of, own, other, factors, self._flags, self.rows
        constants = 0 if whole else 2, targets is None, zero, rounding, _module().BLOCK
        launch("scale", self.rows, self.device, given, constants)


def _rows(found: TensorDescriptors, part_of: Sequence[int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the table of chunks, ordered by their parts, and the part of each."""
    chunk = _module().CHUNK
    sizes, kinds = np.array(found.counts, np.int64), np.array(found.kinds, np.int64)
    part = np.zeros(len(sizes), np.int64) if part_of is None else np.array(part_of, np.int64)
    by_part = np.argsort(part, kind="stable")
    each = -(-sizes[by_part] // chunk)
    number = np.repeat(by_part, each)
    place = np.arange(len(number)) - np.repeat(np.cumsum(each) - each, each)
    item = np.array(_SIZES)[kinds[number]]
    count = np.minimum(sizes[number] - place * chunk, chunk)
    return np.stack([number, place * chunk * item, count, kinds[number]], 1), part[number]


class _Kept:
    """Numbers on a device, copied again only if they change."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._last: Sequence[Any] | None = None
        self._copy: Any = None

    def put(self, numbers: Sequence[Any]) -> torch.Tensor:
        """Return the numbers on the device."""
        if self._last != numbers:
            # A new tensor each time: kernels that read the last one may still be running.
            self._copy = sent(torch.tensor(numbers, dtype=self._dtype, device="cpu"), self._device)
            self._last = numbers
        return self._copy


_tables: OrderedDict[Any, LaunchTable] = OrderedDict()


def table_of(found: TensorDescriptors, part_of: Sequence[int] | None = None, parts: int = 1) -> LaunchTable:
    """Return the table of tensors of these sizes and dtypes, made once for each device, stream and thread."""
    layout = None if part_of is None else tuple(part_of)
    where = found.device, _stream(found.device), threading.get_ident()
    key = (*where, tuple(found.counts), tuple(found.kinds), layout, parts)
    table = _tables.pop(key, None) or LaunchTable(found, part_of, parts)
    _tables[key] = table
    if len(_tables) > _MOST_TABLES:
        _tables.popitem(last=False)
    return table


def _module() -> Any:
    found = kernels()
    assert found is not None
    return found


def _stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


_compiled: dict[Any, Any] = {}


def launch(name: str, programs: int, device: torch.device, given: tuple[Any, ...], constants: tuple[Any, ...]) -> None:
    """Launch a kernel on the current stream. Triton takes longer to find a compiled kernel than to launch it."""
    if not programs:
        return
    # The dtypes of tensors are part of what is compiled.
    key = name, device, constants, (given[2].dtype, given[4].dtype) if name == "decide" else None
    found = _compiled.get(key)
    with _current(device):
        if found is not None:
            found[(programs, 1, 1)](*given, *constants, stream=_stream(device))
            return
        # Under Triton's interpreter there is nothing to keep.
        found = getattr(_module(), name)[(programs,)](*given, *constants, **_module().OPTIONS)
        if found is not None:
            _compiled[key] = found


def _current(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def can_launch(device: torch.device) -> bool:
    """Say whether kernels may be launched now: not into a graph, which would replay the copy of old addresses."""
    # Triton's interpreter runs the kernels on the CPU, and on the CPU only.
    wanted = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if device.type != wanted or fake or kernels() is None:
        return False
    if wanted == "cpu":
        return True
    with _current(device):
        return not torch.cuda.is_current_stream_capturing() and _works(device)


@lru_cache(maxsize=64)
def _works(device: torch.device) -> bool:
    """Try the kernels on a device once. Triton may find no compiler, or not know the device."""
    leaf = torch.zeros(1, device=device)
    found = TensorDescriptors(device, [leaf.data_ptr()], [1], [0], True)
    try:
        table = LaunchTable(found, None, 1)
        table.measure(found.addresses, Order(2.0))
        table.decide(1.0, Order(2.0))
        table.scale(found.addresses)
    except Exception as error:  # whatever Triton raises, PyTorch's own operations can do the same
        _warn(f"Triton cannot run them on {device} ({type(error).__name__}: {error})")
        return False
    return True

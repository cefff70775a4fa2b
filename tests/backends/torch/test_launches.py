"""What the kernels for GPUs read and write beside gradients: tables, addresses, and which ones are launched."""

import gc
import threading
import weakref

import pytest
import torch

import gradclip
from gradclip._src.backends import gpu_switch
from gradclip._src.backends.torch import launches
from gradclip._src.backends.torch.launches import described, table_of
from gradclip._src.core.norms import Order
from interpreted import SILENT, interpreted, switched

pytestmark = pytest.mark.filterwarnings(SILENT)


@pytest.fixture
def launched():
    with interpreted() as found:
        yield found


@pytest.fixture(params=["with the native kernels", "without"])
def either(request, monkeypatch):
    if request.param == "without":
        monkeypatch.setattr(launches.native, "kernels", None)


def grads(*shapes, dtype=torch.float32):
    return [torch.full(shape, 2.0, dtype=dtype) for shape in shapes]


def measured(leaves):
    found = described(leaves)
    table = table_of(found)
    table.measure(found.addresses, Order(2.0))
    return float(table.decide(1.0, Order(2.0))[0])


@pytest.mark.usefixtures("either")
def test_tensors_are_described_by_their_memory():
    flat = torch.arange(24.0)
    leaves = [flat[:6].view(2, 3), flat[6:12].view(2, 3).T, flat[12:13].view(()), flat[13:13], flat[16:].half()]
    found = described(leaves)
    assert (found.counts, found.kinds, found.apart) == ([6, 6, 1, 0, 8], [0, 0, 0, 0, 2], True)
    assert found.addresses[:3] == [flat.data_ptr() + 4 * start for start in (0, 6, 12)]
    assert described([flat[:6], flat[5:7]]).apart is False
    assert described([flat, flat]).apart is False


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    "leaf",
    [
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3, dtype=torch.int32),
        torch.ones(1).expand(3),
        torch.ones(6)[::2],
        torch.ones(3, 4).T[:2],
        torch._neg_view(torch.ones(3)),
        torch.ones(3).to_sparse(),
        torch._efficientzerotensor((3,)),
        torch.ones(3, device="meta"),
    ],
    ids=[
        "float64",
        "complex",
        "integer",
        "expanded",
        "every other",
        "part",
        "negated",
        "sparse",
        "without memory",
        "other device",
    ],
)
def test_what_the_kernels_cannot_read_is_left_to_others(leaf):
    assert described([torch.ones(3), leaf]) is None


def test_a_tensor_in_any_order_of_axes_is_read_as_it_lies(launched):
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert measured([images, torch.randn(7, 5).T]) > 0
    assert len(launches._tables) == 1


def test_a_table_is_made_once_for_sizes_and_dtypes(launched):
    first, second = grads((3, 4), (5,)), grads((3, 4), (5,))
    second[0][0, 0] = 9.0
    assert measured(first) == pytest.approx(2 * 17**0.5)
    assert measured(second) == pytest.approx((4 * 16 + 81) ** 0.5)
    assert len(launches._tables) == 1
    measured(grads((3, 4), (6,)))
    measured(grads((3, 4), (5,), dtype=torch.bfloat16))
    assert len(launches._tables) == 3


def test_addresses_are_sent_only_if_they_change(launched, monkeypatch):
    copies = []
    real = launches.sent
    monkeypatch.setattr(launches, "sent", lambda x, device: copies.append(len(x)) or real(x, device))
    leaves = grads((3,), (4,))
    measured(leaves)
    made = len(copies)
    for _ in range(3):
        measured(leaves)
    assert len(copies) == made
    measured([leaves[0], *grads((4,))])
    assert len(copies) == made + 1


def test_tables_are_forgotten_in_time(launched):
    kept = [weakref.ref(table_of(described(grads((size,))))) for size in range(1, 40)]
    gc.collect()
    assert [one() is not None for one in kept] == [False] * 7 + [True] * 32


def test_each_thread_has_tables_of_its_own(launched):
    found = described(grads((3,)))
    tables = [table_of(found)]
    thread = threading.Thread(target=lambda: tables.append(table_of(found)))
    thread.start()
    thread.join()
    assert tables[0] is not tables[1]
    assert table_of(found) is tables[0]


def test_nothing_is_launched_for_no_elements(launched):
    norms = gradclip.clip_grad_layer_norm_([holder(torch.empty(0)), holder(torch.empty(0, 3))], 1.0)
    assert [float(norm) for norm in norms] == [0.0, 0.0]
    assert launched.names == ["decide"]


def holder(grad):
    parameter = torch.nn.Parameter(torch.zeros_like(grad))
    parameter.grad = grad
    return parameter


def test_a_graph_captures_the_ordinary_path(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launches, "_works", lambda device: True)
    with switched(TRITON_INTERPRET="0", GRADCLIP_GPU_KERNELS="1"):
        for capturing in (True, False):
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
            assert launches.can_launch(cuda) is not capturing


def test_the_interpreter_is_for_the_cpu_and_the_compiler_for_gpus(launched):
    assert launches.can_launch(torch.device("cpu")) is True
    assert launches.can_launch(torch.device("cuda", 0)) is False


def test_a_device_that_triton_cannot_compile_for_is_left_to_others(launched, monkeypatch):
    def failing(*arguments):
        raise RuntimeError("no compiler")

    launches._works.cache_clear()
    monkeypatch.setattr(launches, "launch", failing)
    with pytest.warns(UserWarning, match=r"cannot run them on cpu \(RuntimeError: no compiler\)") as told:
        assert [launches._works(torch.device("cpu")) for _ in range(3)] == [False] * 3
    assert len(told) == 1
    launches._works.cache_clear()


@pytest.mark.parametrize(
    ("setting", "hip", "on"), [("0", None, False), (None, None, True), (None, "6.4", False), ("1", "6.4", True)]
)
def test_they_are_on_by_default_but_on_amd(monkeypatch, setting, hip, on):
    with switched(TRITON_INTERPRET="1"):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.delenv(gpu_switch.VARIABLE, raising=False)
        if setting is not None:
            monkeypatch.setenv(gpu_switch.VARIABLE, setting)
        assert launches.can_launch(torch.device("cpu")) is on


def test_what_is_lacking_is_said_once(monkeypatch):
    with switched(TRITON_INTERPRET="1", GRADCLIP_GPU_KERNELS="1"):
        monkeypatch.setattr(gpu_switch, "lacking", lambda: "Triton is not installed")
        gpu_switch.lacking.cache_clear = lambda: None
        with pytest.warns(UserWarning, match="without its kernels for GPUs: Triton is not installed") as told:
            assert [launches.can_launch(torch.device("cpu")) for _ in range(3)] == [False] * 3
        assert len(told) == 1

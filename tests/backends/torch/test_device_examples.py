"""Examples on an accelerator: few operations and bytes, no wait, no copy of a batch; sums beside exact arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradclip
from frameworks import ALL
from gradclip._src.backends.torch import device_examples
from gradclip._src.backends.torch.device import Torch

DEVICE = next(framework for framework in ALL if framework.name == "torch-device")
HOST = next(framework for framework in ALL if framework.name == "torch")
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
RULES = ("clip", "normalize", "automatic")


class Watch(TorchDispatchMode):
    """Counts operations and bytes of arguments and results; no value may be looked at."""

    def __init__(self):
        super().__init__()
        self.operations = self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(func), "a look at a value waits for the device"
        assert "nonzero" not in str(func)
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            self.operations += 1
            seen = (x for x in tree_leaves([args, kwargs, result]) if isinstance(x, torch.Tensor))
            self.bytes += sum(x.numel() * x.element_size() for x in seen)
        return result


def watched(grads, **options):
    with DEVICE.mode(), Watch() as watch:
        gradclip.per_example_clip(grads, options.pop("max_norm", 1.0), **options)
    return watch.operations, watch.bytes / sum(x.numel() * x.element_size() for x in grads)


# Opacus 1.5's DPOptimizer makes 266 operations of it, and moves 10.1 times the bytes; by layer 320, and 8.1.
FEWEST = [
    ("float32", {}, 110, 6.2),
    ("bfloat16", {}, 110, 10.3),
    ("float16", {}, 110, 10.3),
    ("float64", {}, 134, 9.1),
    ("float32", {"nonfinite": "zero"}, 150, 10.2),
    ("float32", {"nonfinite": "propagate"}, 132, 6.3),
    ("float64", {"nonfinite": "propagate"}, 160, 9.2),
    ("float64", {"rule": "automatic"}, 140, 9.1),
    ("float32", {"rule": "normalize"}, 110, 6.2),
    ("float32", {"rule": "automatic"}, 111, 6.2),
    ("float32", {"mask": torch.ones(64, dtype=torch.bool)}, 114, 6.2),
    ("float32", {"max_norm": torch.tensor(1.0)}, 135, 6.2),
    ("float32", {"per_layer": True}, 260, 6.2),
    ("bfloat16", {"per_layer": True}, 260, 10.3),
    ("float64", {"per_layer": True}, 320, 9.1),
]


@pytest.mark.parametrize(("dtype", "options", "operations", "factor"), FEWEST, ids=str)
def test_few_operations_and_bytes(dtype, options, operations, factor):
    found = watched([torch.ones(64, 2000, dtype=DTYPES[dtype])] * 20, **options)
    assert found[0] <= operations
    assert found[1] <= factor


def test_long_rows_are_read_once_for_their_norms():
    operations, factor = watched([torch.ones(8, 1_500_000)])
    assert operations <= 25  # Opacus 16 of a smaller batch, which needs no blocks
    assert factor < 13.5  # of which sums over only 8 examples, in float64, take some


@pytest.mark.parametrize("nonfinite", ["drop", "zero", "propagate"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_operations_on_a_gpu(dtype, nonfinite):
    options = {"max_norm": 1.0, "nonfinite": nonfinite}
    with FakeTensorMode():
        fakes = [torch.empty(64, 2000, dtype=DTYPES[dtype], device="cuda") for _ in range(20)]
        with Watch() as watch:
            summed, info = gradclip.per_example_clip(fakes, **options)
        assert {x.device.type for x in (*summed, *info)} == {"cuda"}
    assert watch.operations == watched([torch.ones(64, 2000, dtype=DTYPES[dtype])] * 20, **options)[0]


def drawn(dtype, examples, seed=0, spread=3):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-spread, spread, (examples, 1))
    return [torch.from_numpy(rng.normal(size=(examples, n)) * scale).to(DTYPES[dtype]) for n in (33, 7)]


def exact(tensors):
    return [Fraction(value) for x in tensors for value in x.double().flatten().tolist()]


@pytest.mark.parametrize("max_norm", [1.0, 3e-5])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_example_adds_more_than_the_threshold(dtype, rule, max_norm):
    for seed in range(20):
        grads = drawn(dtype, 1, seed)
        with DEVICE.mode():
            summed, info = gradclip.per_example_clip(grads, max_norm, rule=rule, sum_dtype="float64")
        squares = sum(value**2 for value in exact(summed))
        assert squares <= Fraction(max_norm) ** 2
        if rule == "normalize" or (rule == "clip" and float(info.norms) > max_norm):
            assert squares >= (Fraction(max_norm) * (1 - Fraction(2) ** -40)) ** 2
        elif rule == "clip":
            assert exact(summed) == exact(grads)


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1e-160, 1e150, 1e300, 1.7e308])
@pytest.mark.parametrize("max_norm", [1e-290, 1e-20, 1.0, 1e20, 1e290])
@pytest.mark.parametrize("rule", ["clip", "normalize"])
def test_float64_keeps_its_range(scale, max_norm, rule):
    x = torch.tensor([[scale, -scale / 2, 0.0, scale / 4]], dtype=torch.float64)
    with DEVICE.mode():
        summed, info = gradclip.per_example_clip(x, max_norm, rule=rule)
    squares, given = sum(v**2 for v in exact([summed])), sum(v**2 for v in exact([x]))
    if rule == "clip" and given <= Fraction(max_norm) ** 2:
        assert summed.tolist() == x[0].tolist()
    else:
        assert squares <= Fraction(max_norm) ** 2
        assert squares >= (Fraction(max_norm) * (1 - Fraction(1, 10**3 if scale < 1e-310 else 10**12))) ** 2
    if scale < 1e308:
        assert math.isclose(float(info.norms), scale * math.sqrt(1 + 1 / 4 + 1 / 16), rel_tol=1e-12, abs_tol=5e-324 * 4)


@pytest.mark.parametrize("nonfinite", ["drop", "zero", "propagate"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_on_the_host(dtype, rule, nonfinite):
    grads = drawn(dtype, 9, spread=1)
    grads[0][2, 5], grads[1][4, 0], grads[0][6, 1] = math.nan, math.inf, -math.inf
    grads[0][8], grads[1][8] = 0.0, 0.0
    exact_dtype = 1e-12 if dtype == "float64" else 3e-7
    for mask in (None, np.arange(9) % 2 == 0, np.isin(np.arange(9), (0, 1, 3))):
        found = []
        for framework in (HOST, DEVICE):
            with framework.mode():
                found.append(
                    gradclip.per_example_clip(
                        grads, 1.0, rule=rule, nonfinite=nonfinite, mask=mask, sum_dtype="float64", per_layer=True
                    )
                )
        (host, known), (device, told) = found
        for a, b in zip(host, device, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, equal_nan=True)
        for a, b in zip(known.norms, told.norms, strict=True):
            torch.testing.assert_close(a, b, rtol=exact_dtype, atol=0.0, equal_nan=True)
        assert list(map(int, known.num_clipped)) == list(map(int, told.num_clipped))


@pytest.mark.parametrize("nonfinite", ["drop", "zero", "propagate"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_change_nothing_but_the_order(dtype, nonfinite, monkeypatch):
    grads = [x.reshape(11, *shape) for x, shape in zip(drawn(dtype, 11, spread=1), ((3, 11), (7,)), strict=True)]
    clip = lambda: gradclip.per_example_clip(grads, 1.0, nonfinite=nonfinite, sum_dtype="float64")
    with DEVICE.mode():
        whole, info = clip()
        for block in (1, 8, 40):
            monkeypatch.setattr(device_examples, "_BLOCK", block)
            summed, told = clip()
            for a, b in zip(whole, summed, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)
            torch.testing.assert_close(info.norms, told.norms, rtol=3e-7, atol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"rule": "normalize"}, {"to_unit": True}, {"nonfinite": "propagate"}], ids=str)
def test_thresholds_at_the_ends(dtype, options):
    grads = [torch.tensor([[3.0, 4.0], [math.inf, 1.0], [0.0, 0.0]], dtype=DTYPES[dtype])]
    for max_norm in (0.0, 1e-300, math.inf, torch.tensor(0.0), torch.tensor(2.0), torch.tensor(1e-37)):
        if options.get("rule") == "normalize" and math.isinf(max_norm):
            continue  # to the length inf
        found = []
        for framework in (HOST, DEVICE):
            with framework.mode():
                found.append(gradclip.per_example_clip(grads, max_norm, sum_dtype="float64", **options)[0][0])
        torch.testing.assert_close(*found, rtol=1e-12, atol=0.0, equal_nan=True)
        assert found[1].isfinite().all() == ("nonfinite" not in options)


def most_allocated(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]))


@pytest.mark.parametrize("nonfinite", ["drop", "zero", "propagate"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_no_copy_of_a_batch(dtype, nonfinite, monkeypatch):
    monkeypatch.setattr(device_examples, "_BLOCK", 1 << 14)
    grads = [torch.ones(64, 4000, dtype=DTYPES[dtype]) for _ in range(4)]
    with DEVICE.mode():
        most = most_allocated(lambda: gradclip.per_example_clip(grads, 1.0, nonfinite=nonfinite))
    # Wide sums twice, as parts and as one, and handed out; three blocks in float64.
    assert most < 4 * 4000 * 8 * 3 + 3 * (1 << 14) * 8 + 50_000


def test_devices_without_float64_add_in_pairs(monkeypatch):
    made = Torch.__init__

    def without_float64(self, device, *, visible):
        made(self, device, visible=visible)
        self.wide = gradclip._src.core.formats.FLOAT32

    monkeypatch.setattr(Torch, "__init__", without_float64)
    grads = drawn("float32", 9, spread=1)
    grads[0][2, 5] = math.nan
    expected = gradclip.per_example_clip(grads, 1.0)[0]
    with DEVICE.mode():
        summed, _ = gradclip.per_example_clip(grads, 1.0)
    for a, b in zip(expected, summed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", ["clip", "normalize"])
@pytest.mark.parametrize("max_norm", [0.0, torch.tensor(0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_example_of_zeros_spoils_nothing_at_threshold_zero(rule, max_norm, dtype):
    with DEVICE.mode():
        total, _ = gradclip.per_example_clip(torch.zeros(2, 3, dtype=dtype), max_norm, rule=rule, nonfinite="propagate")
    assert total.tolist() == [0.0] * 3


@pytest.mark.parametrize("max_norm", [1.0, torch.tensor(1.0), 1e-250])
def test_zeros_stand_for_nan_where_dtypes_are_mixed(max_norm):
    grads = {"w": torch.tensor([[3.0, 4.0], [math.nan, 1.0]]), "b": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    expected, _ = gradclip.per_example_clip(grads, max_norm, nonfinite="zero")
    with DEVICE.mode():
        found, _ = gradclip.per_example_clip(grads, max_norm, nonfinite="zero")
    for name in grads:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-6, atol=0)


def test_leaves_without_elements_beside_float64():
    grads = [torch.ones(2, 2, dtype=torch.float64), torch.zeros(2, 0, dtype=torch.float64)]
    with DEVICE.mode():
        (found, nothing), _ = gradclip.per_example_clip(grads, 1.0)
        only, _ = gradclip.per_example_clip(grads[1:], 1.0)
    assert found.tolist() == pytest.approx([2**0.5] * 2)
    assert nothing.shape == only[0].shape == (0,)

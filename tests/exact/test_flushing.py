"""Threads that read subnormal numbers as zeros, as `torch.set_flush_denormal(True)` makes them: all numbers count."""

import subprocess
import sys
from fractions import Fraction
from functools import partial
from types import SimpleNamespace

import numpy as np
import optree
import pytest
import torch

import gradclip
from frameworks import ALL, by_name, numpy_dtype
from gradclip._src.inplace.norm import clip_grads_with_norm_
from rational import at_most
from subnormals import flushing

SUBNORMAL = {"float16": 6e-8, "bfloat16": 1e-40, "float32": 1e-40, "float64": 1e-310, "complex64": 1e-40 + 2e-40j}
SMALLEST_NORMAL = np.float32(2.0**-126)
HOSTS = [f for f in ALL if f.name in ("numpy", "torch", "jax", "mlx")]


def drawn(dtype, size, strided):
    """Return subnormal numbers, some of them negative, and a few normal ones beside them."""
    rng = np.random.default_rng(size)
    values = SUBNORMAL[dtype] * rng.integers(1, 20, size) * rng.choice([-1, 1], size)
    values[::5] = values[::5] * 2.0**20
    array = values.astype(numpy_dtype(dtype))
    if not strided:
        return array
    wide = np.zeros(3 * size, array.dtype)
    wide[::3] = array
    return wide[::3]


def fresh(framework, arrays):
    """Return arrays of a framework, in new memory, with the same steps where the framework has such."""
    if framework.name.startswith("jax"):
        return [framework.from_numpy(x) for x in arrays]
    return [
        framework.from_numpy(np.repeat(x, 3))[::3] if x.strides[0] > x.itemsize else framework.from_numpy(x.copy())
        for x in arrays
    ]


def in_place(call):
    def run(tree, limit):
        holders = [SimpleNamespace(grad=x) for x in tree]
        return call(holders, limit), [holder.grad for holder in holders]

    return run


def batches(tree):
    return [x.reshape(-1, 1) for x in tree]


CALLS = {
    "global_norm": lambda tree, limit: [gradclip.global_norm(tree, ord) for ord in (1, 2, 3, "inf", "-inf")],
    "clip_by_global_norm": lambda tree, limit: gradclip.clip_by_global_norm(tree, limit),
    "clip_by_global_norm, inf": lambda tree, limit: gradclip.clip_by_global_norm(tree, limit, ord="inf"),
    "clip_by_layer_norm": lambda tree, limit: gradclip.clip_by_layer_norm(tree, limit),
    "clip_by_value": lambda tree, limit: gradclip.clip_by_value(
        [x for x in tree if "complex" not in str(x.dtype)], limit
    ),
    "per_example_clip": lambda tree, limit: gradclip.per_example_clip(batches(tree), limit),
    "per_example_clip, layers": lambda tree, limit: gradclip.per_example_clip(batches(tree), limit, per_layer=True),
    "per_example_clip, automatic": lambda tree, limit: gradclip.per_example_clip(
        batches(tree), limit, rule="automatic"
    ),
    "norm_at_most": lambda tree, limit: [
        float(gradclip.norm_at_most(x, threshold)) for x in tree for threshold in (limit, 1e-38, 5e-309, 1e-34)
    ],
    "partial_norm": lambda tree, limit: (sum(map(gradclip.partial_norm, tree)).norm, gradclip.partial_norm(tree)),
    "partial_norm, clip": lambda tree, limit: sum(map(gradclip.partial_norm, tree)).clip(tree, limit),
    "grad_norm": in_place(lambda holders, limit: gradclip.grad_norm(holders)),
    "clip_grad_norm_": in_place(gradclip.clip_grad_norm_),
    "clip_grad_norm_, zero": in_place(lambda ps, limit: gradclip.clip_grad_norm_(ps, limit, nonfinite="zero")),
    "clip_grads_with_norm_": in_place(lambda ps, limit: clip_grads_with_norm_(ps, limit, 1e-37)),
}


def bits(framework, result):
    """Return all that a call has returned as bytes."""
    leaves = optree.tree_leaves(result)
    return [x if isinstance(x, float | gradclip.PartialNorm) else framework.to_numpy(x).tobytes() for x in leaves]


def limits(framework):
    """Return thresholds: ordinary ones, subnormal ones, and a subnormal one in an array."""
    return [1e-39, 3e-41, 1e-309, 5e-324, framework.array(1e-40)]


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("framework", HOSTS, ids=by_name)
def test_results_have_the_same_bits(framework, name, strided):
    for dtype in framework.dtypes[:5]:
        arrays = [drawn(dtype, size, strided) for size in (7, 7)]
        for limit in limits(framework):
            expected = bits(framework, CALLS[name](fresh(framework, arrays), limit))
            tree = fresh(framework, arrays)
            with flushing():
                found = CALLS[name](tree, limit)
            assert bits(framework, found) == expected


def on_vmap(leaf, limit):
    return torch.func.vmap(lambda x: gradclip.clip_by_global_norm(x, limit)[0])(leaf[None])[0]


def on_device(leaf, limit):
    with next(f for f in ALL if f.name == "torch-device").mode():
        return gradclip.clip_by_global_norm(leaf, limit)[0]


def on_device_in_place(leaf, limit):
    holder = SimpleNamespace(grad=leaf.clone())
    with next(f for f in ALL if f.name == "torch-device").mode():
        gradclip.clip_grad_norm_(holder, limit)
    return holder.grad


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("call", [on_vmap, on_device, on_device_in_place])
def test_the_bound_holds_where_values_are_not_looked_at(call, dtype):
    torch_framework = next(f for f in ALL if f.name == "torch")
    leaf = torch_framework.from_numpy(drawn(dtype, 7, strided=False))
    for limit in (1e-36, 1e-39, 1e-41, 1e-309, 0.0):
        with flushing():
            found = call(leaf, limit)
        assert at_most([torch_framework.to_numpy(found)], 2, limit)


def test_the_bound_holds_with_so_many_elements_that_pytorch_starts_threads():
    with flushing():
        found = on_device(torch.from_numpy(np.full(1_000_000, 1e-40, np.float32)), 1e-39)
    (element,) = set(found.tolist())
    assert 1_000_000 * Fraction(element) ** 2 <= Fraction(1e-39) ** 2


@pytest.mark.parametrize("before", [False, True], ids=["set after compiling", "set before"])
def test_the_bound_holds_in_compiled_calls(before):
    @partial(torch.compile, backend="eager", fullgraph=True)
    def call(leaf):
        return gradclip.clip_by_global_norm(leaf, 1e-39)[0]

    leaf = torch.full((50,), 1e-39)
    if not before:
        call(leaf)
    with flushing():
        found = call(leaf)
    assert at_most([found.numpy()], 2, 1e-39)


def test_gradients_are_those_of_ordinary_arithmetic():
    def gradient():
        leaf = torch.tensor([3e-20, 4e-20], requires_grad=True)
        gradclip.clip_by_global_norm(leaf, 1e-20)[0].sum().backward()
        return leaf.grad

    expected = gradient()
    with flushing():
        assert torch.equal(gradient(), expected)


@pytest.mark.parametrize("max_norm", [1e-310, 5e-324, 2e-308])
def test_what_is_promised_of_sums_is_no_less(max_norm):
    expected = gradclip.clipped_sum_sensitivity(max_norm, normalize_by=7.0).bound
    with flushing():
        found = gradclip.clipped_sum_sensitivity(max_norm, normalize_by=7.0).bound
    assert found == expected > 0


def test_without_kernels_and_with_threads_that_inherit_the_setting():
    """The values are those of the exact norm: of 1e6 times 1e-40, and of 100 times 1e-310."""
    code = """if True:
        import os
        import numpy as np, torch

        def printed(native):
            os.environ["GRADCLIP_NATIVE"] = native
            import gradclip
            x, y = torch.full((1_000_000,), 1e-40), np.full(200, 1e-310)[::2]
            torch.set_flush_denormal(True)
            norm, clipped_norm = gradclip.global_norm(x).double(), gradclip.clip_by_global_norm(x, 1e-38)[1]
            norms = [norm, gradclip.global_norm(y), clipped_norm]
            torch.set_flush_denormal(False)
            print(*map(float, norms), flush=True)

        for native in ("0", ""):
            if not (child := os.fork()):
                printed(native)
                break
            assert os.waitpid(child, 0)[1] == 0
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    element, lines = float(np.float32(1e-40)), done.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert list(map(float, line.split())) == pytest.approx(
            [1000 * element, 1e-309, 1000 * element], rel=1e-5, abs=0
        )

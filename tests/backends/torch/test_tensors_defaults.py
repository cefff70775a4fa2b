"""PyTorch's default device and default dtype, as a user sets them for new tensors: no call depends on them."""

import math
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import optree
import pytest
import torch

import gradclip
from gradclip._src.inplace.norm import clip_grads_with_norm_
from gradclip._src.passed.leaves import as_floats
from gradclip.integrations import torch as names_of_torch

FLOATS = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
MORE = torch.tensor([12.0, -5.0])
INTEGERS = torch.tensor([70_000, 3])
MASK = torch.tensor([True, False])
SPARSE = torch.sparse_coo_tensor(
    torch.tensor([[0, 2]]), torch.tensor([3.0, 4.0]), (4,), check_invariants=True
).coalesce()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    ROWS = FLOATS.to_sparse_csr()  # which PyTorch calls a beta


class Subclass(torch.Tensor):
    """Its values are not viewed, so it takes the operations of accelerators."""


OF_DEVICE = FLOATS.as_subclass(Subclass)


def in_place(function):
    def call(*tensors):
        made = [SimpleNamespace(grad=tensor.clone()) for tensor in tensors]
        return function(made), [one.grad for one in made]

    return call


def warned(call):
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        return call()


def loss(w, x):
    return (x @ w).sum() * 3.0


def clipped_grad(**options):
    return gradclip.clipped_grad(loss, 1.0, batch_argnums=1, **options)


def backward(**options):
    leaf = FLOATS.clone().requires_grad_()
    clipped, norm = gradclip.clip_by_global_norm([leaf], 1.0, **options)
    (clipped[0].sum() + norm).backward()
    return leaf.grad


OF_FLOATS = {
    "global_norm": lambda: [gradclip.global_norm([FLOATS, MORE], ord) for ord in (1, 2, 3, "inf", "-inf")],
    "layer_norms": lambda: gradclip.layer_norms([FLOATS, MORE]),
    "clip_by_global_norm": lambda: [gradclip.clip_by_global_norm([FLOATS, MORE], 1.0, ord=p) for p in (1, 2, "inf")],
    "threshold": lambda: gradclip.clip_by_global_norm([FLOATS, MORE], torch.tensor(1.0, device="cpu")),
    "sparse": lambda: gradclip.clip_by_global_norm([SPARSE, ROWS], 1.0)[0],
    "sparse by value": lambda: gradclip.clip_by_value([SPARSE, ROWS], 1.0),
    "empty": lambda: gradclip.clip_by_global_norm([FLOATS[:0]], 1.0),
    "backward": lambda: [backward(), backward(ord="inf")],
    "grad": lambda: torch.func.grad(lambda a: gradclip.clip_by_global_norm(a, 1.0)[0].sum())(FLOATS),
    "vmap": lambda: torch.func.vmap(lambda a: gradclip.clip_by_global_norm(a, 1.0)[0])(FLOATS),
    "vmap of batches": lambda: torch.func.vmap(lambda a: gradclip.per_example_clip(a, 1.0)[0])(FLOATS[None]),
    "portable": lambda: [
        gradclip.clip_by_global_norm(OF_DEVICE, 1.0, ord=ord, nonfinite=policy)
        for ord, policy in ((2, "zero"), (3, "drop"), ("inf", "propagate"))
    ],
    "portable by value": lambda: gradclip.clip_by_value(OF_DEVICE, 1.0),
    "partial_norm": lambda: [gradclip.partial_norm(x).clip(x, 1.0) for x in (FLOATS, OF_DEVICE)],
    "norm_at_most": lambda: [gradclip.norm_at_most(x, limit) for x in (FLOATS, OF_DEVICE) for limit in (1, 1e9)],
    "grad_norm": lambda: in_place(gradclip.grad_norm)(FLOATS, MORE),
    "no gradient": lambda: warned(lambda: gradclip.clip_grad_norm_([torch.nn.Parameter(FLOATS)], 1.0)),
    "clip_grad_norm_": lambda: in_place(lambda ps: gradclip.clip_grad_norm_(ps, 1.0))(FLOATS, MORE),
    "clip_grad_norm_, policy": lambda: [
        in_place(lambda ps, policy=policy: gradclip.clip_grad_norm_(ps, 1.0, nonfinite=policy))(x, x * math.nan)
        for x in (FLOATS, OF_DEVICE)
        for policy in ("zero", "drop")
    ],
    "clip_grad_norm_, replaced": lambda: in_place(lambda ps: gradclip.clip_grad_norm_(ps, 1.0))(MORE[:1].expand(3)),
    "clip_grad_norm_, sparse": lambda: in_place(lambda ps: gradclip.clip_grad_norm_(ps, 1.0))(SPARSE)[0],
    "clip_grad_value_": lambda: [
        in_place(lambda ps: gradclip.clip_grad_value_(ps, 1.0))(x) for x in (FLOATS, OF_DEVICE)
    ],
    "clip_grads_with_norm_": lambda: [
        in_place(lambda ps: clip_grads_with_norm_(ps, 1.0, 13.0))(x) for x in (FLOATS, OF_DEVICE)
    ],
    "torch's clip_grad_norm_": lambda: in_place(lambda ps: names_of_torch.clip_grad_norm_(ps, 1.0))(FLOATS),
    "torch's clip_grad_norm_ of nothing": lambda: names_of_torch.clip_grad_norm_([], 1.0),
    "torch's get_total_norm": lambda: [names_of_torch.get_total_norm(x) for x in ([FLOATS, MORE], OF_DEVICE, [])],
    "torch's clip_grads_with_norm_": lambda: in_place(
        lambda ps: names_of_torch.clip_grads_with_norm_(ps, 1.0, names_of_torch.get_total_norm([FLOATS]))
    )(FLOATS),
    "clipped_grad": lambda: clipped_grad()(MORE, FLOATS),
    "clipped_grad, mask": lambda: [
        clipped_grad(microbatch_size=1)(MORE, FLOATS, mask=m) for m in (MASK, [True, False])
    ],
    "clipped_grad, NumPy": lambda: clipped_grad(microbatch_size=1)(MORE, FLOATS.numpy()),
    "clipped_grad, nothing": lambda: clipped_grad(microbatch_size=1)(MORE, FLOATS[:0]),
    "clipped_grad, loop": lambda: clipped_grad(method="loop")(MORE, FLOATS.numpy()),
    "clipped_fun": lambda: gradclip.clipped_fun(lambda x: {"a": x * 3}, 1.0, normalize_by=2.0)(FLOATS),
}
OPTIONS = (
    {},
    {"per_layer": True},
    {"mask": [True, False]},
    {"mask": MASK},
    {"rule": "automatic"},
    {"sum_dtype": "float64"},
    {"grid": 1000},
    {"to_unit": True},
    {"nonfinite": "zero"},
)
OF_FLOATS |= {
    f"per_example_clip {options}": lambda options=options: [
        gradclip.per_example_clip([x, MORE], 1.0, **options) for x in (FLOATS, OF_DEVICE)
    ]
    for options in OPTIONS
}
OF_NUMBERS = {
    "integers": lambda: gradclip.clip_by_global_norm([FLOATS, INTEGERS], 1.0),
    "integers by layer": lambda: gradclip.clip_by_layer_norm(
        [FLOATS, INTEGERS], [1.0, torch.tensor(2.0, device="cpu")]
    ),
    "integers by value": lambda: gradclip.clip_by_value([FLOATS, INTEGERS], 1e5),
    "integers, portable": lambda: gradclip.clip_by_global_norm([OF_DEVICE, INTEGERS], 1.0),
    "integers, vmap": lambda: torch.func.vmap(lambda *x: gradclip.clip_by_global_norm(x, 1.0)[0])(
        FLOATS[None], INTEGERS[None]
    ),
    "integers, parts": lambda: gradclip.partial_norm([FLOATS, INTEGERS]).clip([FLOATS, INTEGERS], 1.0),
    "integers for a library that counts them": lambda: as_floats([INTEGERS]),
    "numbers": lambda: gradclip.clip_by_global_norm([FLOATS, 1e6, 70_000.0], 1.0),
    "numbers by value": lambda: gradclip.clip_by_value([FLOATS, 1e6, 70_000.0], 1e5),
    "complex numbers": lambda: gradclip.clip_by_global_norm([FLOATS, 7e4j], 1.0),
}


@contextmanager
def default_device():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SETTINGS = {
    "set_default_device": default_device,
    "with torch.device": lambda: torch.device("meta"),
    "float16": lambda: default_dtype(torch.float16),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
}
NARROW = [name for name in SETTINGS if name != "float64"]


def described(result):
    """Return types, devices, dtypes and values of all that a call has returned."""
    return [
        (type(x), x.device, x.dtype, x.layout, None if x.is_meta else str(x.to_dense().tolist()))
        if isinstance(x, torch.Tensor)
        else x
        for x in optree.tree_leaves(result)
    ]


@pytest.mark.parametrize("name", OF_FLOATS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_results_are_the_same_under_any_default(setting, name):
    expected = described(OF_FLOATS[name]())
    with SETTINGS[setting]():
        found = OF_FLOATS[name]()
    assert described(found) == expected


@pytest.mark.parametrize("name", OF_NUMBERS)
@pytest.mark.parametrize("setting", NARROW)
def test_numbers_are_promoted_to_float32_at_least(setting, name):
    expected = described(OF_NUMBERS[name]())
    with SETTINGS[setting]():
        found = OF_NUMBERS[name]()
    assert described(found) == expected
    assert all(isinstance(x, type(None)) or torch.isfinite(x.to_dense()).all() for x in optree.tree_leaves(found))


def test_numbers_are_promoted_to_a_default_that_is_wider():
    with default_dtype(torch.float64):
        clipped, norm = gradclip.clip_by_global_norm([FLOATS, INTEGERS, 3.0], 1e9)
        assert as_floats(INTEGERS).dtype is torch.float64
    assert [x.dtype for x in (*clipped, norm)] == [torch.float32, torch.int64, torch.float64, torch.float64]


@pytest.mark.parametrize("setting", ["with torch.device", "float16"])
def test_compiled_calls_are_the_same_under_any_default(setting):
    def call(x):
        return gradclip.clip_by_global_norm([x], 1.0)

    expected = described(torch.compile(call, backend="eager")(FLOATS))
    torch.compiler.reset()
    with SETTINGS[setting]():
        found = torch.compile(call, backend="eager")(FLOATS)
    assert described(found) == expected


def test_a_self_test_of_sensitivity_runs_under_any_default():
    fun = gradclip.clipped_fun(lambda x: {"a": x * 3}, 1.0)
    usual = gradclip.check_sensitivity(fun, FLOATS, sensitivity=1.0, trials=4)
    with default_device():
        assert str(gradclip.check_sensitivity(fun, FLOATS, sensitivity=1.0, trials=4)) == str(usual)

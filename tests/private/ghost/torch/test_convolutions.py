"""Convolutions come in patches: windows of the input, cut out exactly."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import gradclip
from gradclip._src.private.ghost.records import Made
from gradclip._src.private.ghost.torch import run
from gradclip._src.private.ghost.torch.taps import TorchTaps
from tapped_torch import distance, gradients_by_loop, tapped_gradients, with_aux

# PyTorch says it once in a process.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
DTYPE = torch.float64


def last(y):
    """A loss of any result in which each element counts differently."""
    weights = torch.arange(1, y.numel() + 1, dtype=y.dtype).reshape(y.shape)
    return (torch.sin(y) * weights).sum()


def checked(module, shape):
    """Return the uses of a module's parameters and the result, after a look at the gradients."""
    torch.manual_seed(0)
    module.to(DTYPE)
    params = {name: torch.randn_like(x) for name, x in module.named_parameters()}
    loss = lambda p, x: last(torch.func.functional_call(module, p, (x,)))
    x = torch.randn(3, *shape, dtype=DTYPE)
    uses, result, found = tapped_gradients(loss, params, x)
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10
    assert result.untapped == {}
    return uses, result


# Each: a layer, the shape of an example, the positions, the shape of the kernel as matrices.
LAYERS = [
    (nn.Conv1d(2, 4, 3, stride=2, padding=1), (3, 2, 9), 15, (1, 4, 6)),
    (nn.Conv1d(2, 4, 3), (2, 9), 7, (1, 4, 6)),
    (nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2)), (3, 2, 9, 8), 150, (1, 4, 12)),
    (nn.Conv2d(4, 6, 3, groups=2, padding="same", dilation=2), (1, 4, 7, 8), 56, (2, 3, 18)),
    (nn.Conv2d(4, 4, 4, groups=4, padding="same", bias=False), (1, 4, 7, 8), 56, (4, 16, 1)),
    (nn.Conv2d(4, 4, 3, padding="valid"), (1, 4, 7, 8), 30, (1, 4, 36)),
    (nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), (1, 4, 7, 8), 56, (1, 4, 36)),
    (nn.Conv3d(2, 3, 2), (1, 2, 4, 3, 3), 12, (1, 3, 16)),
    (nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (2, 4, 5), 10, (2, 2, 9)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, dilation=3, output_padding=(1, 2)), (4, 5, 4), 20, (1, 4, 54)),
    (nn.ConvTranspose3d(2, 2, 2, bias=False), (2, 2, 3, 2, 2), 24, (1, 2, 16)),
]


@pytest.mark.parametrize(("module", "shape", "positions", "matrices"), LAYERS, ids=lambda x: f"{x}")
def test_convolutions_have_a_term_for_each_position(module, shape, positions, matrices):
    uses, result = checked(module, shape)
    (use,) = uses["weight"].uses
    assert (use.terms, use.place.shape) == (positions, matrices)
    assert use.operation.startswith("conv")
    if module.bias is not None:
        assert uses["bias"].reason == f"bias of {use.operation}"
        assert isinstance(result.gradients[0], Made)


@pytest.mark.parametrize("size", [1, 2**11, 2**21])
@pytest.mark.parametrize(("module", "shape"), [layer[:2] for layer in LAYERS], ids=lambda x: f"{x}")
def test_gradients_that_are_made_come_piece_by_piece(module, shape, size, monkeypatch):
    monkeypatch.setattr(run, "_PIECE", size)
    torch.manual_seed(0)
    module.to(DTYPE)
    params = {name: torch.randn_like(x) for name, x in module.named_parameters()}
    loss = lambda p, x: last(torch.func.functional_call(module, p, (x,)))
    x = torch.randn(5, *shape, dtype=DTYPE)
    flags = [True] * len(params)
    result = TorchTaps().run(with_aux(loss), 0, (params, x), (None, 0), flags, flags)
    assert all(isinstance(gradient, Made) for gradient in result.gradients)
    found = {name: gradient.rows for name, gradient in zip(sorted(params), result.gradients, strict=True)}
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10


class Largest(TorchDispatchMode):
    """Sees the most elements of a tensor that has memory of its own."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.is_contiguous():
            self.elements = max(self.elements, made.numel())
        return made


def test_patches_of_all_examples_are_never_there_together():
    params = {"w": torch.randn(32, 16, 5, 5, generator=torch.Generator().manual_seed(0)) / 20}
    clipped = gradclip.clipped_grad(lambda p, x: F.conv2d(x, p["w"]).tanh().sum(), 1.0, pad_to=128)
    x = torch.randn(128, 16, 14, 14, generator=torch.Generator().manual_seed(1))
    (leaf,) = clipped.plan(params, x).leaves
    assert (leaf.how, leaf.terms) == ("product", 100)
    clipped(params, x)
    with Largest() as seen:
        clipped(params, x)
    assert seen.elements == 128 * 32 * 16 * 5 * 5  # the gradients; all patches would have 100 in the place of 32


def test_patches_are_parts_of_the_input():
    x = torch.tensor([[[1.0, 2.0, 3.0]]])
    _, result, _ = tapped_gradients(lambda p, x: F.conv1d(x, p["w"], padding=1).sum(), {"w": torch.ones(1, 1, 2)}, x)
    (part,) = result.gradients[0]
    (term,) = part.terms
    assert term.right.tolist() == [[[[1.0]] * 4]]
    assert term.left.tolist() == [[[[0.0, 1.0], [1.0, 2.0], [2.0, 3.0], [3.0, 0.0]]]]


def test_a_network_with_norms():
    network = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 2))
    uses, _ = checked(network, (1, 2, 5, 5))
    assert [name for name, use in uses.items() if not use.reason] == ["0.weight", "3.weight"]


def test_half_a_kernel_is_a_part_of_it():
    params = {"w": torch.randn(4, 2, 3, dtype=DTYPE, generator=torch.Generator().manual_seed(0))}
    loss = lambda p, x: last(F.conv1d(x, p["w"][:2])) + last(F.conv1d(x, p["w"][2:], torch.ones(2, dtype=DTYPE)))
    x = torch.randn(3, 1, 2, 5, dtype=DTYPE, generator=torch.Generator().manual_seed(1))
    uses, result, found = tapped_gradients(loss, params, x)
    assert [(use.place.start, use.place.stop) for use in uses["w"].uses] == [
        ((0, 0, 0), (2, 2, 3)),
        ((2, 0, 0), (4, 2, 3)),
    ]
    assert len(result.gradients[0]) == 2
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10


def test_kernels_that_turn_are_made():
    params = {"w": torch.randn(4, 2, 3, dtype=DTYPE, generator=torch.Generator().manual_seed(0))}
    loss = lambda p, x: last(F.conv1d(x, p["w"].transpose(0, 1).reshape(4, 2, 3)))
    x = torch.randn(3, 1, 2, 5, dtype=DTYPE, generator=torch.Generator().manual_seed(1))
    uses, _, found = tapped_gradients(loss, params, x)
    assert uses["w"].reason == "torch.Tensor.reshape"
    assert distance(found, gradients_by_loop(loss, params, x)) < 1e-10

"""Small trainings whose gradients are far above 1, and functions that clip them."""

import warnings

import torch
from torch.nn.utils import clip_grad_norm_ as torch_clip

import gradclip
from gradclip.integrations.torch import clip_grad_norm_ as drop_in


def own_clip(parameters, max_norm):
    """Clip as many projects do that have their own function."""
    grads = [one.grad for one in parameters if one.grad is not None]
    norm = torch.stack([grad.norm() for grad in grads]).norm()
    for grad in grads:
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


STEPS = 9
SEEN = {"torch": torch_clip, "gradclip": gradclip.clip_grad_norm_, "drop-in": drop_in}
CLIPS = SEEN | {"own": own_clip}


def network(dtype=torch.float32):
    layers = [torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)]
    return torch.nn.Sequential(*layers).to(dtype)


def loss_of(model, scale=30.0):
    """Return a loss whose gradient is far above 1."""
    dtype = next(model.parameters()).dtype
    return (model(torch.randn(16, 4, dtype=dtype)) * scale).square().mean()


def descent(model, lr=1e-4, make=torch.optim.SGD, **settings):
    return make(model.parameters(), lr=lr, **settings)


def trained(optimizer, once, max_norm=1.0, steps=STEPS, looks=4, **settings):
    """Take steps with a guard that looks at the first two, and at each of a multiple of 4; it must say nothing."""
    watched = gradclip.guard(optimizer, max_norm, every=4, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(steps):
            once()
    watched.remove()
    assert (watched.reports, watched.looks) == ([], looks), watched
    return watched


def named(optimizer, once, kind, words, steps=6, max_norm=1.0, **settings):
    """Take steps with a guard; check that it names one kind of mistake, once, and return the finding."""
    watched = gradclip.guard(optimizer, max_norm, every=3, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            once()
    watched.remove()
    told = [one for one in caught if one.category is gradclip.ClippingWarning]
    assert [one.kind for one in watched.reports] == [kind], watched
    (found,) = watched.reports
    assert words in found.sentence
    assert [str(one.message) for one in told] == [str(found)]
    assert found.fix in str(found)
    # The warning is about the user's line, not about PyTorch's or gradclip's.
    assert told[0].filename == once.__code__.co_filename
    assert f"1 mistake, removed)\n- {kind}, step {found.step}: " in repr(watched)
    return found

"""Derivatives that PyTorch asks for: of complex numbers, and in compiled code."""

import numpy as np
import pytest
import torch

import gradclip


def test_complex_gradients_in_torch():
    z = torch.tensor([3 + 4j, 1 - 2j], requires_grad=True, dtype=torch.complex128)
    ours = gradclip.clip_by_global_norm(z, 1.0)[0].real.sum()
    theirs = (z / torch.linalg.vector_norm(z)).real.sum()
    np.testing.assert_allclose(torch.autograd.grad(ours, z)[0], torch.autograd.grad(theirs, z)[0], rtol=1e-12)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_torch_compile_keeps_values_and_gradients():
    clip = torch.compile(lambda x: gradclip.clip_by_global_norm({"x": x}, 1.0), backend="eager", fullgraph=True)
    clipped, norm = clip(torch.tensor([3.0, 4.0]))
    np.testing.assert_allclose(clipped["x"], [0.6, 0.8], rtol=2e-7)
    assert float(norm) == 5.0
    x = torch.tensor([3.0, 4.0], requires_grad=True)
    clip(x)[0]["x"][0].backward()
    np.testing.assert_allclose(x.grad, [0.128, -0.096], rtol=1e-5)

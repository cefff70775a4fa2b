"""The device of the tests in tests/gpu, with what only a GPU has: streams, graphs, and errors where a call waits.

With GRADCLIP_TEST_DEVICE=cpu the same tests run on the CPU as a rehearsal. All that differs then is in `Rehearsal`.
"""

import os
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the memory

import numpy as np
import torch

from gradclip._src.backends.torch import framework

DEVICE = torch.device(os.environ.get("GRADCLIP_TEST_DEVICE", "cuda"))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# Relative distances: how far a clipped norm may lie below the threshold.
TIGHT = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


class Cuda:
    """A GPU: who sends messages between processes, its name in JAX, its half type, and whether graphs capture steps."""

    processes, jax, half, capturable = "nccl", "gpu", torch.float16, True

    def standing_in(self):
        return nullcontext()

    def synchronize(self):
        torch.cuda.synchronize()

    @contextmanager
    def waiting_is_an_error(self):
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def delay(self):
        """Keep the current stream busy for some 20 ms, so that the host runs far ahead of it."""
        torch.cuda._sleep(40_000_000)

    def stream(self):
        return torch.cuda.Stream()

    def using(self, stream):
        return torch.cuda.stream(stream)

    def before(self, stream):
        """Let a stream begin after what the current one has to do."""
        stream.wait_stream(torch.cuda.current_stream())

    def after(self, stream):
        """Let the current stream go on after what another one has to do."""
        torch.cuda.current_stream().wait_stream(stream)

    def captured(self, step, warmups=3):
        """Run a step some times, capture it in a graph, which does not run it, and return what runs the graph."""
        side = self.stream()
        self.before(side)
        with self.using(side):
            for _ in range(warmups):
                step()
        self.after(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay


class Rehearsal:
    """The CPU: calls run in order, and nothing waits. A captured step is the step itself."""

    processes, jax, half, capturable = "gloo", "cpu", torch.bfloat16, False

    def standing_in(self):
        """If Triton interprets the kernels, let CPU tensors take the path of those of a device."""
        if os.environ.get("TRITON_INTERPRET") != "1":
            return nullcontext()
        return mock.patch.object(framework, "in_host_memory", return_value=False)

    def synchronize(self):
        pass

    delay = stream = synchronize

    def waiting_is_an_error(self):
        return nullcontext()

    def using(self, stream):
        return nullcontext()

    def before(self, stream):
        pass

    after = before

    def captured(self, step, warmups=3):
        for _ in range(warmups):
            step()
        return step


ON = Rehearsal() if DEVICE.type == "cpu" else Cuda()


def moved(leaves):
    """Return copies of tensors on the device, which requires to wait."""
    return [x.to(DEVICE, copy=True) for x in leaves]


def on_host(leaves):
    """Return the values of tensors as float64 arrays, which requires to wait."""
    return [x.detach().cpu().double().numpy() for x in leaves]


def drawn(seed, dtypes, shapes, scale=1.0):
    """Return normal numbers as tensors on the CPU, whose dtypes take turns, and copies of them on the device."""
    rng = np.random.default_rng(seed)
    made = [torch.tensor(np.float64(rng.standard_normal(shape)) * scale) for shape in shapes]
    leaves = [x.to(dtypes[i % len(dtypes)]) for i, x in enumerate(made)]
    return leaves, moved(leaves)


def held(leaves):
    """Return holders of copies of gradients, which lie in memory as these do."""
    return [SimpleNamespace(grad=x.clone()) for x in leaves]


def grads(holders):
    return [one.grad for one in holders]


def parameters_with(leaves):
    """Return parameters of zeros on the device with copies of these gradients."""
    made = [torch.nn.Parameter(torch.zeros_like(x, device=DEVICE)) for x in leaves]
    for parameter, grad in zip(made, moved(leaves), strict=True):
        parameter.grad = grad
    return made


def numbers(*values, dtype=torch.float32):
    """Return a vector on the device."""
    return torch.tensor(values, dtype=dtype).to(DEVICE)


def same_bits(leaves, others):
    """Say whether tensors on the device hold the same bits as those on the CPU."""
    return all(torch.equal(_bits(x), _bits(y)) for x, y in zip(leaves, others, strict=True))


def _bits(x):
    return x.detach().cpu().reshape(-1).view(torch.uint8)


# A short training, and the same on the CPU in float64 with PyTorch's own clipping


def network(device=DEVICE, dtype=torch.float32):
    """Return a small network, always with the same weights."""
    generator = torch.Generator().manual_seed(0)
    made = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return made.to(device, dtype)


def batches(count, device=DEVICE, dtype=torch.float32):
    """Return inputs of some steps. From one to the next, they are larger by half: so norms grow, too."""
    generator = torch.Generator().manual_seed(1)
    return [(1.5**i * torch.randn(8, 12, generator=generator)).to(device, dtype) for i in range(count)]


def loss_of(model, x):
    return model(x).square().sum(-1).mean()


def trained_on_host(optimizer_of, max_norm, inputs):
    """Return the weights after plain steps on the CPU in float64, clipped by PyTorch, and the norms before clipping."""
    model, norms = network("cpu", torch.float64), []
    optimizer = optimizer_of(model.parameters())
    for x in inputs:
        optimizer.zero_grad()
        loss_of(model, x.cpu().double()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
    return on_host(model.parameters()), norms


def check_weights(model, wanted, rtol=1e-4):
    for found, other in zip(on_host(model.parameters()), wanted, strict=True):
        np.testing.assert_allclose(found, other, rtol=rtol, atol=rtol)

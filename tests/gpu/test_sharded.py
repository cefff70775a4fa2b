"""FSDP2 on one device: gradients are distributed tensors, whose norms go through the process group."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradclip
from gradclip import clip_at_step
from on_gpu import DEVICE, ON, batches, check_weights, loss_of, network, on_host, trained_on_host
from rational import at_most, power_of_norm

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    file = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group(ON.processes, init_method=f"file://{file}", rank=0, world_size=1)
    yield init_device_mesh(DEVICE.type, (1,))
    dist.destroy_process_group()


@pytest.fixture
def model(mesh):
    made = network()
    for layer in (made[0], made[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(made, mesh=mesh)


def whole(parameters):
    return on_host([p.grad.full_tensor() for p in parameters])


def known(x):
    """Return the gradients on the CPU in float64."""
    reference = network("cpu", torch.float64)
    loss_of(reference, x.cpu().double()).backward()
    return [p.grad.numpy() for p in reference.parameters()]


@pytest.mark.parametrize("ord", [1, 2, math.inf])
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_one_norm(model, ord, share):
    (x,) = batches(1)
    loss_of(model, x).backward()
    before = whole(model.parameters())
    wanted = float(gradclip.global_norm(known(x), ord))
    norm = gradclip.clip_grad_norm_(model.parameters(), wanted * share, ord)
    assert float(norm) == pytest.approx(wanted, rel=1e-4)
    assert float(norm) == pytest.approx(float(gradclip.global_norm(before, ord)), rel=1e-6)
    after = whole(model.parameters())
    for old, new in zip(before, after, strict=True):
        np.testing.assert_allclose(new, old * min(1.0, wanted * share / float(norm)), rtol=1e-5)
    if share < 1:
        assert at_most(after, ord, wanted * share)
        assert ord != 2 or power_of_norm(after, 2) >= (wanted * share * (1 - 1e-5)) ** 2
    else:
        assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("policy", ["propagate", "drop", "zero"])
def test_policies(model, policy):
    loss_of(model, batches(1)[0]).backward()
    first = next(model.parameters())
    first.grad.to_local()[0, 0] = math.nan
    gradclip.clip_grad_norm_(model.parameters(), 0.1, nonfinite=policy)
    after = whole(model.parameters())
    if policy == "zero":
        assert after[0][0, 0] == 0
        assert at_most(after, 2, 0.1)
        assert power_of_norm(after, 2) >= 0.0999**2
    else:
        assert all((np.isnan(x) if policy == "propagate" else x == 0).all() for x in after)


def test_layers_and_names(model):
    (x,) = batches(1)
    loss_of(model, x).backward()
    wanted = known(x)
    norms = gradclip.clip_grad_layer_norm_(model.parameters(), 0.1)
    assert [float(norm) for norm in norms] == pytest.approx([np.linalg.norm(g) for g in wanted], rel=1e-4)
    assert all(at_most([x], 2, 0.1) for x in whole(model.parameters()))
    gradclip.clip_grad_norm_(model.named_parameters(), {"0.*": 0.05, "*": 0.025})
    after = whole(model.parameters())
    assert at_most(after[:2], 2, 0.05)
    assert at_most(after[2:], 2, 0.025)
    assert power_of_norm(after, 2) >= (0.05**2 + 0.025**2) * 0.9999


@pytest.mark.parametrize("how", ["by hand", "at the step", "folded"])
def test_a_training(model, how):
    def optimizer_of(parameters, **settings):
        return torch.optim.Adam(parameters, lr=0.02, eps=1e-2, **settings)

    optimizer, inputs, norms = optimizer_of(model.parameters(), fused=how == "folded"), batches(4), []
    clipping = None if how == "by hand" else clip_at_step(optimizer, 0.7)
    for x in inputs:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        norm = gradclip.clip_grad_norm_(model.parameters(), 0.7) if clipping is None else None
        optimizer.step()
        norms.append(float(norm if clipping is None else clipping.norm))
    wanted, told = trained_on_host(optimizer_of, 0.7, inputs)
    assert norms == pytest.approx(told, rel=1e-4)
    for found, other in zip(on_host([p.full_tensor() for p in model.parameters()]), wanted, strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-4)


def test_gradients_that_processes_hold(mesh):
    """A group of this process alone: the norm goes through it all the same."""
    model = network()
    (x,) = batches(1)
    loss_of(model, x).backward()
    norm = gradclip.clip_grad_norm_(model.parameters(), 0.25, process_group=mesh.get_group())
    assert float(norm) == pytest.approx(math.sqrt(sum((g**2).sum() for g in known(x))), rel=1e-4)
    assert at_most(on_host([p.grad for p in model.parameters()]), 2, 0.25)


def test_replicas(mesh):
    """DistributedDataParallel on one process: steps are those without it."""
    model = network()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=0.05), batches(4)
    for x in inputs:
        optimizer.zero_grad()
        loss_of(wrapped, x).backward()
        gradclip.clip_grad_norm_(wrapped.parameters(), 0.7)
        optimizer.step()
    wanted, _ = trained_on_host(lambda p: torch.optim.SGD(p, lr=0.05), 0.7, inputs)
    check_weights(model, wanted)

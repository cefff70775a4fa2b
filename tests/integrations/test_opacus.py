"""`PrivacyEngine` in whole trainings, beside Opacus' own engine on the same batches."""

import copy
import inspect
import math
import sys
import types
import warnings

import opacus
import pytest
import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradclip.integrations.opacus import AdaClipDPOptimizer, DPOptimizer, DPPerLayerOptimizer, PrivacyEngine

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:GDP accounting is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha:UserWarning"),
]
EXAMPLES, RATE = 64, 0.125
ADAPTIVE = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 1e-9,
}
ENGINES = [PrivacyEngine, opacus.PrivacyEngine]


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3)
    )


def data(scale=1.0):
    torch.manual_seed(1)
    return TensorDataset(scale * torch.randn(EXAMPLES, 1, 6, 6), torch.arange(EXAMPLES) % 3)


def private(engine, *, module=None, dataset=None, lr=0.5, **settings):
    """Return what an engine makes of a model, an optimizer and a loader."""
    module, dataset = module or model(), dataset or data()
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 1.0} | settings
    loader = DataLoader(dataset, batch_size=int(EXAMPLES * RATE))
    return engine.make_private(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=lr), data_loader=loader, **settings
    )


def train(engine, batches=None, *, reduction="mean", **settings):
    """Train for an epoch, or on the given batches, and return the parameters."""
    module, optimizer, loader = private(engine, loss_reduction=reduction, **settings)
    torch.manual_seed(2)
    for features, labels in loader if batches is None else batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(features), labels, reduction=reduction).backward()
        optimizer.step()
    return [p.detach().clone() for p in optimizer.params], optimizer


def assert_close(actual, expected, atol):
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0.0, atol=atol)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.parametrize("threshold", [0.05, 1.0, 100.0])
def test_an_epoch_gives_the_parameters_that_opacus_gives(mode, threshold):
    """Opacus' epsilon of 1e-6 shortens a clipped example by 1e-6 / norm: a step of 0.5 by less than 1e-6."""
    ours, optimizer = train(PrivacyEngine(), grad_sample_mode=mode, max_grad_norm=threshold)
    theirs, _ = train(opacus.PrivacyEngine(), grad_sample_mode=mode, max_grad_norm=threshold)
    assert type(optimizer) is DPOptimizer
    assert_close(ours, theirs, 3e-6)
    assert any((x != y).any() for x, y in zip(ours, model().parameters(), strict=True))


def test_the_modes_agree_to_the_rounding_of_float32():
    batch = [next(iter(DataLoader(data(), batch_size=16)))]
    made = [train(PrivacyEngine(), batch, grad_sample_mode=mode)[0] for mode in ("hooks", "functorch", "ew")]
    for other in made[1:]:
        assert_close(other, made[0], 3e-8)


@pytest.mark.parametrize("sampling", [True, False])
def test_per_layer_and_adaptive_clipping_give_what_opacus_gives(sampling):
    layers = [0.3 + 0.1 * i for i in range(8)]
    for kind, settings in (
        (DPPerLayerOptimizer, {"clipping": "per_layer", "max_grad_norm": layers}),
        (AdaClipDPOptimizer, {"max_grad_norm": 0.5, **ADAPTIVE}),
    ):
        batches = None if sampling and kind is DPPerLayerOptimizer else [tuple(data()[:8]), tuple(data()[8:16])]
        (ours, optimizer), (theirs, other) = (
            train(make(), batches, poisson_sampling=sampling, **settings) for make in ENGINES
        )
        assert type(optimizer) is kind
        assert_close(ours, theirs, 3e-6)
        assert float(optimizer.max_grad_norm) == pytest.approx(float(other.max_grad_norm), rel=1e-6)


@pytest.mark.parametrize("accountant", ["rdp", "gdp", "prv"])
def test_epsilon_is_that_of_opacus(accountant):
    found = []
    for make in ENGINES:
        engine = make(accountant=accountant)
        _, optimizer = train(engine, noise_multiplier=1.1)
        found.append(engine.get_epsilon(delta=1e-3))
        assert optimizer.noise_multiplier == 1.1
    assert found[0] == found[1] > 0


def test_a_target_epsilon_gives_the_noise_that_opacus_gives():
    found = []
    for make in ENGINES:
        module = model()
        _, optimizer, _ = make(accountant="rdp").make_private_with_epsilon(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            data_loader=DataLoader(data(), batch_size=8),
            target_epsilon=4.0,
            target_delta=1e-3,
            epochs=2,
            max_grad_norm=1.0,
        )
        found.append((optimizer.noise_multiplier, isinstance(optimizer, DPOptimizer)))
    assert found == [(found[0][0], True), (found[0][0], False)]


def test_virtual_batches_give_the_step_of_the_whole_batch():
    whole, _ = train(PrivacyEngine())
    module, optimizer, loader = private(PrivacyEngine())
    torch.manual_seed(2)
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as small:
        sizes = []
        for features, labels in small:
            optimizer.zero_grad()
            sizes.append(len(labels))
            nn.functional.cross_entropy(module(features), labels).backward()
            optimizer.step()
    assert max(sizes) == 3
    assert len(sizes) > 2 / RATE
    # The mean of a loss over fewer examples has other roundings: each example's gradient has an error of an ulp.
    assert_close([p.detach() for p in optimizer.params], whole, 1e-6)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
def test_empty_poisson_batches_give_noise(mode):
    dataset = TensorDataset(torch.randn(20, 1, 6, 6), torch.arange(20) % 3)
    module = model()
    module, optimizer, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        data_loader=DataLoader(dataset, batch_size=1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
    )
    torch.manual_seed(3)
    empty = 0
    for features, labels in loader:
        optimizer.zero_grad()
        before = [p.detach().clone() for p in optimizer.params]
        nn.functional.cross_entropy(module(features), labels).backward()
        optimizer.step()
        if not len(labels):
            empty += 1
            assert all((p != x).all() for p, x in zip(optimizer.params, before, strict=True))
            assert all(torch.isfinite(p).all() for p in optimizer.params)
    assert empty


def test_a_nan_example_leaves_the_others():
    features, labels = data()[:8]
    spoiled = features.clone()
    spoiled[3] = math.nan
    others = [i for i in range(8) if i != 3]
    with pytest.warns(UserWarning, match="1 of 8 examples have gradients with NaN"):
        ours, optimizer = train(PrivacyEngine(), [(spoiled, labels)], reduction="sum")
    expected, _ = train(PrivacyEngine(), [(features[others], labels[others])], reduction="sum")
    assert_close(ours, expected, 1e-6)
    assert optimizer.num_nonfinite == 1


def test_an_adam_optimizer_trains_with_noise_and_schedulers():
    engine, module = PrivacyEngine(accountant="rdp"), model()
    module, optimizer, loader = engine.make_private(
        module=module,
        optimizer=torch.optim.Adam(module.parameters(), lr=0.01),
        data_loader=DataLoader(data(), batch_size=16),
        noise_multiplier=0.5,
        max_grad_norm=1.0,
        noise_generator=torch.Generator().manual_seed(5),
    )
    clipping = opacus.schedulers.ExponentialGradClip(optimizer, gamma=0.9)
    noise = opacus.schedulers.ExponentialNoise(optimizer, gamma=0.9)
    for features, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(features), labels).backward()
        optimizer.step()
        clipping.step()
        noise.step()
    assert optimizer.max_grad_norm == pytest.approx(0.9**4)
    assert optimizer._std(16) == pytest.approx(0.9**4 * 0.5 * 0.9**4, rel=1e-8)
    assert engine.get_epsilon(1e-3) > 0


def test_checkpoints_and_hooks_without_a_wrapper_work(tmp_path):
    engine, module = PrivacyEngine(accountant="rdp"), model()
    hooks, optimizer, _ = private(engine, module=module, noise_multiplier=1.0, wrap_model=False)
    features, labels = data()[:8]
    nn.functional.cross_entropy(module(features), labels).backward()
    optimizer.step()
    hooks.cleanup()
    engine.save_checkpoint(path=tmp_path / "a.pt", module=module)
    again = PrivacyEngine(accountant="rdp")
    restored = copy.deepcopy(model())
    again.load_checkpoint(path=tmp_path / "a.pt", module=restored)
    assert again.get_epsilon(1e-3) == engine.get_epsilon(1e-3)


def test_secure_mode_takes_the_secure_generator(monkeypatch):
    generator = torch.Generator().manual_seed(11)
    library = types.SimpleNamespace(create_random_device_generator=lambda path: generator)
    monkeypatch.setitem(sys.modules, "torchcsprng", library)
    engine = PrivacyEngine(secure_mode=True)
    _, optimizer, _ = private(engine, noise_multiplier=1.0)
    assert optimizer.generator is generator
    assert optimizer.secure_mode


@pytest.mark.after_error
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grad_sample_mode": "ghost_fsdp"}, "grad_sample_mode='ghost_fsdp' is not supported. Pass one of .*'ghost'"),
        ({"grad_sample_mode": "ghost", "wrap_model": False}, "'ghost' does not support wrap_model=False. Pass grad_s"),
        ({"grad_sample_mode": "ghost", "batch_first": False}, "'ghost' does not support batch_first=False"),
        ({"grad_sample_mode": "ghost", "clipping": "per_layer"}, "'ghost' does not support clipping='per_layer'"),
        ({"clipping": "sideways"}, r"clipping='sideways' is not supported in one process. Pass one of \['adaptive',"),
    ],
)
def test_what_is_not_supported_is_an_error_and_the_module_stays_as_it_was(settings, message):
    module = model()
    with pytest.raises(NotImplementedError, match=message):
        private(PrivacyEngine(), module=module, **settings)
    assert not any(hasattr(p, "grad_sample") for p in module.parameters())
    assert not any(m._forward_hooks or m._backward_hooks for m in module.modules())


def test_adaptive_clipping_over_processes_is_an_error():
    module = DifferentiallyPrivateDistributedDataParallel.__new__(DifferentiallyPrivateDistributedDataParallel)
    with pytest.raises(NotImplementedError, match=r"over several processes. Pass one of \['flat', 'per_layer'\]"):
        PrivacyEngine().make_private(module=module, clipping="adaptive")


def test_the_engine_takes_the_arguments_of_opacus():
    for name in ("__init__", "make_private", "make_private_with_epsilon", "_prepare_model"):
        ours, theirs = (inspect.signature(getattr(kind, name)) for kind in ENGINES)
        assert ours == theirs


def test_ordinary_training_warns_of_nothing_more_than_opacus():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Full backward hook|Secure RNG")
        train(PrivacyEngine(), noise_multiplier=1.0)


class OfPositions(nn.Module):
    """A model as GPT-2: one row of position ids for all examples."""

    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(7, 6), nn.Embedding(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.head((self.words(x) + self.places(torch.arange(x.shape[1])[None])).mean(1))


@pytest.mark.filterwarnings("ignore:In CPU autocast:UserWarning")
@pytest.mark.parametrize("mode", ["hooks", "functorch"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_layer_that_was_called_with_another_batch_is_named_with_a_way_out(mode, clipping):
    dataset = TensorDataset(torch.zeros(EXAMPLES, 5, dtype=torch.int64), torch.arange(EXAMPLES) % 3)
    most = 1.0 if clipping == "flat" else [1.0] * 4
    module, optimizer, _ = private(
        PrivacyEngine(),
        module=OfPositions(),
        dataset=dataset,
        grad_sample_mode=mode,
        clipping=clipping,
        max_grad_norm=most,
    )
    before = [p.detach().clone() for p in module.parameters()]
    nn.functional.cross_entropy(module(dataset.tensors[0][:4]), dataset.tensors[1][:4]).backward()
    with pytest.raises(
        ValueError, match=r"a batch of 4 .*: places.weight for 1\. .* pass grad_sample_mode=\"ghost\" to"
    ):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))

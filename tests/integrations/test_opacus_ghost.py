"""`grad_sample_mode="ghost"`, beside Opacus' own on the same batches."""

import math
from fractions import Fraction

import opacus
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from gradclip.integrations.opacus import PrivacyEngine
from rational import at_most

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning"),
    pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning"),
    pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning"),
]
EXAMPLES, WORDS = 64, 1000
ENGINES = [PrivacyEngine, opacus.PrivacyEngine]


class Words(nn.Module):
    """The mean of the words' vectors, two layers, and a score for each class or, if tied, for each word."""

    def __init__(self, *, tied):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 64)
        self.hidden = nn.Linear(64, 64)
        self.head = nn.Linear(64, WORDS if tied else 3)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words, scale=1.0):
        return scale * self.head(torch.tanh(self.hidden(self.embedding(words).mean(-2))))


def network(kind):
    torch.manual_seed(0)
    if kind == "perceptron":
        return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 3))
    return Words(tied=kind == "tied")


def data(kind, examples=EXAMPLES):
    torch.manual_seed(1)
    drawn = torch.randn(examples, 64) if kind == "perceptron" else torch.randint(WORDS, (examples, 5))
    return TensorDataset(drawn, torch.arange(examples) % 3)


def private(engine, kind="perceptron", dataset=None, criterion=None, **settings):
    """Return what an engine makes in mode "ghost" of a model, an optimizer, a criterion and a loader."""
    module, dataset = network(kind), dataset or data(kind)
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 0.5, "grad_sample_mode": "ghost"} | settings
    criterion = criterion or nn.CrossEntropyLoss(reduction=settings.get("loss_reduction", "mean"))
    return engine.make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.5),
        criterion=criterion,
        data_loader=DataLoader(dataset, batch_size=8),
        **settings,
    )


def sums(engine, batch, *args, **settings):
    """Return the clipped sum of a batch for each parameter in float64, and the optimizer."""
    model, optimizer, criterion, _ = private(engine, *args, **settings)
    criterion(model(batch[0]), batch[1]).backward()
    optimizer.step()
    return [p.summed_grad.double() for p in optimizer.params], optimizer


def hooked(batch, kind, **settings):
    """Return the clipped sums by the gradients of all examples, with Opacus' hooks."""
    model, optimizer, _ = private(PrivacyEngine(), kind, grad_sample_mode="hooks", **settings)
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    return [p.summed_grad.double() for p in optimizer.params]


def assert_close(actual, expected, atol):
    for x, y in zip(actual, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=0.0, atol=atol)


def spoiled(x, row):
    """Return the batch with a NaN in one example."""
    x = x.clone()
    x[row] = math.nan
    return x


@pytest.mark.parametrize("kind", ["perceptron", "words"])
@pytest.mark.parametrize("threshold", [0.01, 0.5, 100.0])
def test_clipped_sums_are_those_of_opacus(kind, threshold):
    """Opacus' epsilon of 1e-6 shortens a clipped example by 1e-6 / norm, here by less than 2e-6 of the threshold."""
    batch = data(kind)[:32]
    (ours, _), (theirs, _) = (sums(make(), batch, kind, max_grad_norm=threshold) for make in ENGINES)
    assert_close(ours, theirs, max(threshold, 1.0) * 3e-6)
    assert any(x.abs().max() > 1e-4 for x in ours)


def test_large_gradients_are_not_made():
    model, _, criterion, _ = private(PrivacyEngine())
    batch = [x.repeat(4, *[1] * (x.ndim - 1)) for x in data("perceptron")[:]]
    criterion(model(batch[0]), batch[1]).backward()
    plan = criterion._made[1].plan(dict(model._module.named_parameters()), batch)
    assert [leaf.how for leaf in plan.leaves if math.prod(leaf.shape) >= 2**14] == ["ghost", "ghost"]


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_one_example_moves_the_sum_by_at_most_the_threshold(scale):
    model, optimizer, criterion, _ = private(PrivacyEngine(), loss_reduction="sum")
    torch.manual_seed(0)
    for _ in range(20):
        criterion(model(torch.randn(1, 64) * scale), torch.tensor([1])).backward()
        optimizer.step()
        assert at_most([p.summed_grad.double().numpy() for p in optimizer.params], 2, 0.5)
        assert any(p.summed_grad.any() for p in optimizer.params)
        optimizer.zero_grad()


def test_tied_parameters_are_clipped_as_one():
    batch = (data("tied")[:16][0], torch.arange(16) * 7)
    found, _ = sums(PrivacyEngine(), batch, "tied", max_grad_norm=0.1)
    assert_close(found, hooked(batch, "tied", max_grad_norm=0.1), 1e-6)
    with pytest.raises(NotImplementedError, match="Parameter tying is not supported"):
        sums(opacus.PrivacyEngine(), batch, "tied")


def test_a_large_batch_is_added_up_in_parts():
    batch = data("perceptron", 600)[:]
    found, _ = sums(PrivacyEngine(), batch)
    parts = [sums(PrivacyEngine(), [x[start : start + 150] for x in batch])[0] for start in range(0, 600, 150)]
    assert_close(found, [sum(x[1:], x[0]) for x in zip(*parts, strict=True)], 1e-5)


def test_an_epoch_gives_the_parameters_and_losses_that_opacus_gives():
    found = []
    for make in ENGINES:
        engine = make(accountant="rdp")
        model, optimizer, criterion, loader = private(engine, "words")
        losses = []
        torch.manual_seed(2)
        for features, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(features), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        found.append((losses, [p.detach() for p in optimizer.params]))
    assert found[0][0] == pytest.approx(found[1][0], abs=2e-5)
    assert_close(found[0][1], found[1][1], 3e-6)


def test_epsilon_is_that_of_opacus():
    found = []
    for make in ENGINES:
        engine = make(accountant="rdp")
        model, optimizer, criterion, loader = private(engine, noise_multiplier=1.1)
        for features, labels in loader:
            optimizer.zero_grad()
            criterion(model(features), labels).backward()
            optimizer.step()
        found.append(engine.get_epsilon(delta=1e-3))
    assert found[0] == found[1] > 0


def test_virtual_batches_give_the_step_of_the_whole_batch():
    features, labels = data("perceptron")[:]
    whole, _ = sums(PrivacyEngine(), (features, labels))
    model, optimizer, criterion, _ = private(PrivacyEngine())
    loader = DataLoader(TensorDataset(features, labels), batch_size=EXAMPLES)
    sizes = []
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=24, optimizer=optimizer) as small:
        for x, y in small:
            optimizer.zero_grad()
            sizes.append(len(y))
            criterion(model(x), y).backward()
            optimizer.step()
    assert len(sizes) == 3
    assert_close([p.summed_grad.double() for p in optimizer.params], whole, 1e-6)


def test_the_noise_covers_what_sums_of_factors_round():
    """4 * 1 + 1024 examples at most: 2 * 1.01 * (256 + 2) * 2**-33 times the threshold for each."""
    _, ours, _, _ = private(PrivacyEngine(), noise_multiplier=1.0)
    _, hooks, _ = private(PrivacyEngine(), noise_multiplier=1.0, grad_sample_mode="hooks")
    added = Fraction(202, 100) * 258 * 1028 / 2**33 / 2
    assert ours._std(1) - hooks._std(1) == pytest.approx(float(added), rel=1e-4)


def test_an_example_with_nan_adds_nothing():
    features, labels = data("perceptron")[:8]
    others = [0, 1, 2, 4, 5, 6, 7]
    with pytest.warns(UserWarning, match="1 of 8 examples have gradients with NaN"):
        found, optimizer = sums(PrivacyEngine(), (spoiled(features, 3), labels))
    assert optimizer.num_nonfinite == 1
    assert_close(found, sums(PrivacyEngine(), (features[others], labels[others]))[0], 1e-6)


def test_an_empty_batch_gives_noise():
    model, optimizer, criterion, _ = private(PrivacyEngine(), noise_multiplier=1.0)
    before = [p.detach().clone() for p in optimizer.params]
    criterion(model(torch.zeros(0, 64)), torch.zeros(0, dtype=torch.int64)).backward()
    optimizer.step()
    assert all((p != x).all() and torch.isfinite(p).all() for p, x in zip(optimizer.params, before, strict=True))


def test_a_loss_times_a_number_scales_each_gradient():
    batch = data("perceptron")[:8]
    model, optimizer, criterion, _ = private(PrivacyEngine(), max_grad_norm=100.0)
    loss = criterion(model(batch[0]), batch[1])
    value = loss.item()
    assert value == pytest.approx(float(nn.functional.cross_entropy(model(batch[0]), batch[1])), rel=1e-6)
    assert (2 * loss / 4).item() == value / 2
    assert str(loss) == f"{value:.4f}"
    (0.5 * loss).backward()
    optimizer.step()
    whole, _ = sums(PrivacyEngine(), batch, max_grad_norm=100.0)
    assert_close([2 * p.summed_grad.double() for p in optimizer.params], whole, 1e-6)
    with pytest.raises(TypeError, match="unsupported operand"):
        loss + 1.0


def test_weights_of_classes_count_as_in_opacus():
    weights = torch.tensor([0.2, 1.0, 3.0])
    batch = data("perceptron")[:8]
    (ours, _), (theirs, _) = (
        sums(make(), batch, criterion=nn.CrossEntropyLoss(weight=weights), max_grad_norm=100.0) for make in ENGINES
    )
    assert_close(ours, theirs, 1e-5)


def test_a_criterion_may_be_a_function_and_take_keywords():
    batch = data("words")[:8]

    def doubled(scores, labels, *, times):
        return times * nn.functional.cross_entropy(scores, labels)

    model, optimizer, criterion, _ = private(PrivacyEngine(), "words", criterion=doubled, max_grad_norm=100.0)
    for scale in (1.0, 3.0):  # an argument that changes
        criterion(model(batch[0], scale=scale), batch[1], times=2.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, optimizer, criterion, _ = private(PrivacyEngine(), "words", criterion=doubled, max_grad_norm=100.0)
    criterion(model(batch[0]), batch[1], times=2.0).backward()
    optimizer.step()
    whole, _ = sums(PrivacyEngine(), batch, "words", max_grad_norm=100.0)
    assert_close([p.summed_grad.double() / 2 for p in optimizer.params], whole, 1e-6)


def test_scheduled_thresholds_count_from_the_next_batch():
    batch = data("perceptron")[:8]
    model, optimizer, criterion, _ = private(PrivacyEngine())
    schedule = opacus.schedulers.ExponentialGradClip(optimizer, gamma=0.1)
    for threshold in (0.5, 0.05):
        optimizer.zero_grad()
        criterion(model(batch[0][:1]), batch[1][:1]).backward()
        optimizer.step()
        norm = math.sqrt(sum(float((p.summed_grad**2).sum()) for p in optimizer.params))
        assert norm == pytest.approx(threshold, rel=1e-5)
        schedule.step()


def test_a_model_that_does_not_train_is_called_as_it_is():
    model, optimizer, criterion, _ = private(PrivacyEngine())
    x, y = data("perceptron")[:8]
    with torch.no_grad():
        plain = nn.functional.cross_entropy(model(x), y)
        assert torch.equal(criterion(model(x), y), plain)
    model.eval()
    assert model(x).requires_grad
    loss = criterion(model(x), y)
    assert torch.equal(loss, plain)
    loss.backward()
    with pytest.raises(ValueError, match="Per sample gradient is not initialized"):  # no gradients of examples
        optimizer.step()
    with pytest.raises(TypeError, match="what the model returned in its last call in training"):
        criterion(model.train()(x).clone(), y)


@pytest.mark.after_error
def test_mistakes_are_errors():
    x, y = data("perceptron")[:4]
    model, optimizer, criterion, _ = private(PrivacyEngine())
    with pytest.raises(TypeError, match="Move what is between both, such as flatten"):
        criterion(model(x).view(4, 3), y)
    with pytest.raises(ValueError, match=r"must have the batch on axis 0, got the shapes \[\(4, 64\), \(3,\)\]"):
        criterion(model(x), y[:3]).backward()
    loss = criterion(model(x), y)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"backward\(\) was called twice before a step"):
        loss.backward()
    optimizer.step()
    with pytest.raises(ValueError, match="reduction='sum', but loss_reduction is 'mean'"):
        private(PrivacyEngine(), criterion=nn.CrossEntropyLoss(reduction="sum"))

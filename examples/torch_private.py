"""Make an ordinary training loop private, compute its epsilon, and compare with Opacus.

Privacy is with respect to adding or removing one example (Abadi et al. 2016). `torch.randn` is not cryptographically
secure: learn from this script, but do not release models trained with it.
`private_cnn_torch.py` trains one that may be released.
"""

import dp_accounting
import opacus
import torch
from dp_accounting.pld import PLDAccountant
from sklearn.datasets import load_digits
from torch.func import functional_call
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import gradclip

EPOCHS = 20
BATCH = 150
LEARNING_RATE = 1.0
MAX_NORM = 1.0
NOISE_MULTIPLIER = 2.0
DELTA = 1e-4


def ordinary(model, data):
    """Train without privacy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(EPOCHS):
        for features, labels in DataLoader(data, BATCH, shuffle=True):
            optimizer.zero_grad()
            cross_entropy(model(features), labels).backward()
            optimizer.step()
    return float("inf")


def with_gradclip(model, data):
    """Train privately: the loop above with three lines changed. Return epsilon."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    rate, steps = BATCH / len(data), EPOCHS * len(data) // BATCH
    largest = BATCH + int(6 * BATCH**0.5)  # six standard deviations above: one batch in a billion is larger

    def loss_of(parameters, features, labels):
        return cross_entropy(functional_call(model, parameters, (features,)), labels)

    # These share memory with the model's parameters, so they follow the optimizer's updates.
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    clipped_grad = gradclip.clipped_grad(loss_of, MAX_NORM, batch_argnums=(1, 2), pad_to=largest)
    # The sensitivity includes the rounding of the sum.
    noise_std = clipped_grad.sensitivity("add_or_remove_one").noise_std(NOISE_MULTIPLIER)
    for _ in range(steps):
        # 1. Sample each example with the same probability, as the accountant assumes.
        features, labels, mask = poisson_batch(data, rate, largest)
        # 2. Instead of backward(), clip the gradient of each example and add them.
        summed = clipped_grad(parameters, features, labels, mask=mask)
        # 3. Add noise, then divide by the expected batch size. The true size is secret.
        for name, parameter in model.named_parameters():
            parameter.grad = (summed[name] + noise_std * torch.randn_like(parameter)) / BATCH
        optimizer.step()
    accountant = PLDAccountant()
    step = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(NOISE_MULTIPLIER))
    return accountant.compose(step, steps).get_epsilon(DELTA)


def poisson_batch(data, rate, largest):
    """Return a random batch of fixed size with the examples in random rows, and a mask of those rows."""
    chosen = torch.nonzero(torch.rand(len(data)) < rate).flatten()
    if len(chosen) > largest:
        raise RuntimeError(f"a batch of {len(chosen)} examples does not fit into {largest}: start again.")
    places = torch.randperm(largest)
    rows = torch.nn.functional.pad(chosen, (0, largest - len(chosen)))[places]
    return *data[rows], places < len(chosen)


def with_opacus(model, data):
    """Train privately with Opacus, which wraps the model, the optimizer and the loader. Return epsilon."""
    engine = opacus.PrivacyEngine(accountant="prv")
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        data_loader=DataLoader(data, BATCH),
        noise_multiplier=NOISE_MULTIPLIER,
        max_grad_norm=MAX_NORM,
    )
    for _ in range(EPOCHS):
        for features, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(features), labels).backward()
            optimizer.step()
    return engine.get_epsilon(DELTA)


def main():
    # A network this small is faster on one thread than on several.
    torch.set_num_threads(1)
    digits = load_digits()
    features, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    data = TensorDataset(features[:1500], labels[:1500])
    print(f"{EPOCHS} epochs, noise multiplier {NOISE_MULTIPLIER:g}, delta {DELTA:g}")
    for name, train in {"ordinary": ordinary, "gradclip": with_gradclip, "Opacus": with_opacus}.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 10))
        epsilon = train(model, data)
        accuracy = (model(features[1500:]).argmax(1) == labels[1500:]).float().mean()
        print(f"{name:9} epsilon {epsilon:5.3f}, accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()

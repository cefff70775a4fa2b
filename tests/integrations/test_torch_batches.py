"""Poisson batches through PyTorch's `DataLoader`: the same batches, with their masks."""

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import gradclip
from gradclip import PoissonBatches
from gradclip.integrations.torch import MaskedDataset, PoissonSampler, poisson_loader

X, Y = torch.arange(24.0).reshape(12, 2), torch.arange(12)
BATCHES = PoissonBatches(n=12, rate=0.4, steps=5, pad_to=9, seed=1)


class AtOnce(Dataset):
    """A data set that loads a batch at once, and nothing else."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        raise AssertionError("one at a time")

    def __getitems__(self, indices):
        return [X[i] for i in indices]


@pytest.mark.filterwarnings("ignore:os.fork")  # of JAX, which the workers do not use
@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_gives_the_batches_and_their_masks(workers):
    loader = poisson_loader(TensorDataset(X, Y), BATCHES, num_workers=workers)
    assert len(loader) == 5
    found = list(loader)
    for ((x, y), mask), (indices, expected) in zip(found, BATCHES, strict=True):
        assert mask.dtype == torch.bool
        assert mask.tolist() == expected.tolist()
        assert y.tolist() == indices.tolist()
        assert x.tolist() == X[indices].tolist()
    assert len({tuple(mask.tolist()) for _, mask in found}) > 1


def test_a_data_set_that_loads_batches_at_once_does():
    for (x, mask), (indices, expected) in zip(poisson_loader(AtOnce(), BATCHES), BATCHES, strict=True):
        assert x.tolist() == X[indices].tolist()
        assert mask.tolist() == expected.tolist()


def test_the_sum_has_the_chosen_examples_alone():
    clipped = gradclip.clipped_grad(lambda w, x, y: (w * x).sum() + 0 * y.sum(), 100.0, batch_argnums=(1, 2), pad_to=9)
    for (batch, mask), (indices, filled) in zip(poisson_loader(TensorDataset(X, Y), BATCHES), BATCHES, strict=True):
        summed = clipped(torch.zeros(2), *batch, mask=mask)
        assert summed.tolist() == X[indices[filled]].sum(dim=0).tolist()


def test_the_parts_by_themselves():
    data, sampler = MaskedDataset(TensorDataset(X)), PoissonSampler(BATCHES)
    assert (len(data), len(sampler)) == (12, 5)
    masks = [mask.tolist() for _, mask in DataLoader(data, batch_sampler=sampler)]
    assert masks == [mask.tolist() for _, mask in BATCHES]
    place = next(iter(sampler))[0]
    (x,), filled = data[place]
    assert x.tolist() == X[place.index].tolist()
    assert filled is place.filled


@pytest.mark.parametrize("data", [TensorDataset(X), list(range(12)), X.numpy(), {i: i for i in range(12)}])
def test_a_data_set_without_the_mask_is_an_error(data):
    with pytest.raises((TypeError, IndexError, KeyError)):
        next(iter(DataLoader(data, batch_sampler=PoissonSampler(BATCHES))))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(X)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: poisson_loader(TensorDataset(X[1:]), BATCHES),
            ValueError,
            "has 11 examples, but the batches are of n=12",
        ),
        (lambda: poisson_loader(Stream(), BATCHES), ValueError, "has no length or no __getitem__"),
        (
            lambda: poisson_loader(TensorDataset(X), [[1]]),
            TypeError,
            "batches must be a gradclip.PoissonBatches, got list",
        ),
        (
            lambda: poisson_loader(TensorDataset(X), BATCHES, shuffle=True),
            TypeError,
            "takes no shuffle: the batches say",
        ),
    ],
)
def test_what_has_no_poisson_batches(call, error, text):
    with pytest.raises(error, match=text):
        call()

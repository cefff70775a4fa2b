"""Which examples each batch of a loader holds. tests/trainers/test_spikes.py has the trainers that ask."""

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, TensorDataset

from gradclip.integrations._torch_steps import BatchIndices, StepNotes

DATA = TensorDataset(torch.arange(10))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Skips(DataLoader):
    def __iter__(self):
        return (batch for batch in super().__iter__() if batch[0][0])


def passed(loader, found):
    """Return what is known of each batch in one pass, and the batches."""
    return [(found.batch(place), [int(x) for x in batch[0].reshape(-1)]) for place, batch in enumerate(loader)]


@pytest.mark.parametrize(
    "loader", [DataLoader(Stream()), DataLoader(DATA, num_workers=1, in_order=False), Skips(DATA), [1, 2]]
)
def test_loaders_that_cannot_be_followed(loader):
    assert BatchIndices.of(loader) is None


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 3, "shuffle": True},
        {"batch_size": None, "shuffle": True},
        {"batch_size": None, "sampler": BatchSampler(RandomSampler(DATA), 4, drop_last=True)},
        {"batch_sampler": [(1, 2), [3], torch.tensor([4, 5])]},
    ],
    ids=["shuffled batches", "shuffled", "batches as samples", "given batches"],
)
def test_each_batch_has_its_indices(settings):
    loader = DataLoader(DATA, **settings)
    before = (loader.sampler, loader.batch_sampler, len(loader))
    found = BatchIndices.of(loader)
    assert BatchIndices.of(loader) is found
    for _ in range(2):
        found.begin()
        seen = passed(loader, found)
        assert seen
        assert all(known == values for known, values in seen)
    assert isinstance(loader.sampler, type(before[0]))
    assert len(loader) == before[2]
    found.stop()
    assert (loader.sampler, loader.batch_sampler) == before[:2]


def test_passes_of_others_make_it_unknown_until_the_next():
    loader = DataLoader(DATA, 2)
    found = BatchIndices.of(loader)
    mine = iter(loader)
    assert (next(mine)[0].tolist(), found.batch(0)) == ([0, 1], [0, 1])
    next(iter(loader))
    assert (next(mine)[0].tolist(), found.batch(1)) == ([2, 3], None)
    found.begin()
    next(mine)
    assert found.batch(0) is None
    assert passed(loader, found)[1] == ([2, 3], [2, 3])


def test_a_step_of_which_one_batch_is_unknown_has_no_context():
    notes = StepNotes(None, None)
    assert (notes.loss, notes.context) == (None, None)
    for told in ([1, 2], [3]):
        notes.add(torch.tensor(0.5, requires_grad=True), told)
    assert (notes.context, notes.loss.item(), notes.loss.requires_grad) == ([1, 2, 3], 1.0, False)
    notes.add("no loss", None)
    assert (notes.context, notes.loss.item()) == (None, 1.0)
    notes.begin()
    assert (notes.loss, notes.context) == (None, None)

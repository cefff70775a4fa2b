"""Poisson batches for PyTorch's `DataLoader`: a batch sampler, and a data set that says which places are empty."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradclip._src.backends.imported import needed_for
from gradclip._src.private.run.batches import PoissonBatches
from gradclip._src.public import public_in

with needed_for("torch", "torch"):
    from torch.utils.data import DataLoader, Dataset, Sampler


@public_in("integrations.torch")
@dataclass(frozen=True, slots=True)
class Place:
    """A place in a batch: the index of its example, and whether an example is there.

    It is no index by itself, so a data set that is not a `MaskedDataset` raises an error.
    """

    index: int
    filled: bool


@public_in("integrations.torch")
class PoissonSampler(Sampler[list[Place]]):
    """The batches of a `PoissonBatches` as lists of places: a `batch_sampler` for a `DataLoader` of a `MaskedDataset`.

    `poisson_loader` makes both.
    """

    def __init__(self, batches: PoissonBatches) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Place]]:
        for indices, mask in self.batches:
            yield list(map(Place, indices.tolist(), mask.tolist()))


@public_in("integrations.torch")
class MaskedDataset(Dataset[Any]):
    """A data set whose items are `(item, filled)`, taken by the places of a `PoissonSampler`.

    An empty place gives the item of index 0 and False: batches have one size, and the mask leaves it out of the sum.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, place: Place) -> tuple[Any, bool]:
        return self.dataset[place.index], place.filled

    def __getitems__(self, places: Sequence[Place]) -> list[tuple[Any, bool]]:
        """Return the items of a batch, all at once if the data set can."""
        together = getattr(self.dataset, "__getitems__", None)
        indices = [place.index for place in places]
        items = [self.dataset[i] for i in indices] if together is None else together(indices)
        return [(item, place.filled) for item, place in zip(items, places, strict=True)]


@public_in("integrations.torch")
def poisson_loader(dataset: Any, batches: PoissonBatches, **options: Any) -> DataLoader[Any]:
    """Return a `DataLoader` that gives `(batch, mask)` for each of the batches.

    Args:
        dataset: a data set with a length and indices.
        batches: a `gradclip.PoissonBatches` with `n` equal to the length.
        options: other arguments of `DataLoader`, such as `num_workers` and `pin_memory`. A `collate_fn` gets a list of
            pairs `(item, filled)`.

    `batch` is what `DataLoader` makes of `pad_to` items, and `mask` a tensor of as many booleans. Pass both to the
    clipped function: `clipped(parameters, *batch, mask=mask)`.

    Raises:
        ValueError: a data set of another length, or one that cannot be indexed. TypeError: batches of another type, or
        an option that a batch sampler excludes.

    >>> import torch
    >>> data = torch.utils.data.TensorDataset(torch.arange(4.0))
    >>> batches = PoissonBatches(n=4, rate=1.0, steps=1, pad_to=6)
    >>> for (x,), mask in poisson_loader(data, batches):
    ...     print(x.shape, x[mask].sort().values)
    torch.Size([6]) tensor([0., 1., 2., 3.])
    """
    if not isinstance(batches, PoissonBatches):
        raise TypeError(f"batches must be a gradclip.PoissonBatches, got {type(batches).__name__}.")
    taken = sorted({"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last"} & options.keys())
    if taken:
        raise TypeError(f"poisson_loader takes no {taken[0]}: the batches say which examples are in them.")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            "Poisson sampling takes examples by their index, and this data set has no length or no __getitem__. Load "
            "it into a data set that has."
        )
    if len(dataset) != batches.n:
        raise ValueError(f"the data set has {len(dataset)} examples, but the batches are of n={batches.n}.")
    return DataLoader(MaskedDataset(dataset), batch_sampler=PoissonSampler(batches), **options)

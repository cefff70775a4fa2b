"""How to make arrays of what is none: open files, paths, tables and iterators."""

from collections.abc import Iterator, Mapping, Set
from os import PathLike


def how_to_convert(leaf: object) -> str:
    """Return the advice for a leaf that holds arrays but is none, for errors; empty if there is nothing to say."""
    if isinstance(leaf, Mapping):
        return " Convert it with dict(...), which loads the arrays if it is an open file."
    if hasattr(leaf, "to_numpy"):
        return " Pass the result of its to_numpy()."
    if isinstance(leaf, str | bytes | PathLike) or hasattr(leaf, "read"):
        return " Load the arrays of a file first: dict(numpy.load(path, allow_pickle=False)) for .npz."
    if isinstance(leaf, Iterator):
        return (
            " Convert it with list(...). If it yields parameters, call gradclip.grad_norm or gradclip.clip_grad_norm_ "
            "for their gradients."
        )
    return " Convert it with list(...)." if isinstance(leaf, Set | range) else ""

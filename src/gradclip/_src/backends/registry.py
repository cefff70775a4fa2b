"""Find the framework of a value, and what the framework supplies. All other code asks here.

A framework is loaded only when one of its arrays arrives. Its arrays are recognized by type, among the modules that are
already imported.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from gradclip._src.backends.entries import ENTRIES, Entry, Models
from gradclip._src.backends.imported import check_release, is_recent, when_imported
from gradclip._src.core.protocols import Backend
from gradclip._src.flush_mode import ask_whether_compiling
from gradclip._src.tree import Trees, find_trees_with
from gradclip._src.words import typed

if TYPE_CHECKING:
    from gradclip._src.backends.framework import Framework

_NUMBER = "number"
_ALONE = {"numpy", _NUMBER}
_ENTRIES: dict[str, Entry] = {}
# `isinstance` on every leaf would take longer than clipping it. There are few types, so each is classified once.
_KEY_BY_TYPE: dict[type, str | None] = {}
_LOADED: "dict[str, Framework]" = {}


def register(entry: Entry) -> None:
    """Add a framework, so that its arrays can be clipped from now on."""
    _ENTRIES[entry.module] = entry
    _KEY_BY_TYPE.clear()  # its arrays may have been classified as unknown before
    at_import = entry.at_import
    if at_import is not None:
        when_imported(entry.module, lambda: at_import() if is_recent(entry.module) else None)


def load(entry: Entry) -> "Framework":
    """Return what a framework supplies, importing its folder if needed. Raises ImportError for old releases."""
    framework = _LOADED.get(entry.module)
    if framework is None:
        check_release(entry.module)
        framework = entry.load()
        check_release(entry.module)  # perhaps imported only now
        _LOADED[entry.module] = framework
    return framework


def named(module: str) -> Entry:
    """Return a framework's entry by the name of its module."""
    return _ENTRIES[module]


def find(leaves: Sequence[Any], names: Callable[[], Sequence[str]], *scalars: object) -> Backend:
    """Return the backend for these leaves and for the thresholds and masks passed with them.

    Raises TypeError if a leaf is not an array of a supported framework, or if the leaves mix frameworks.
    """
    keys = _keys_of(leaves)
    # A traced threshold or mask has no value, so NumPy could not compute with it.
    if scalars and keys <= _ALONE:
        keys |= {_key_of(scalar) for scalar in scalars if _takes_over(scalar)}
    if None in keys:
        # Names are computed only for the error, because for many leaves that takes long.
        index = [known(leaf) for leaf in leaves].index(False)
        raise TypeError(_no_array(leaves[index], names()[index]))
    if len(keys) > 1:
        keys.discard(_NUMBER)
        if any(_ENTRIES[str(key)].takes_numpy for key in keys):
            keys.discard("numpy")
    if len(keys) > 1:
        raise TypeError(
            f"one tree must hold arrays of one framework, got {' and '.join(sorted(map(str, keys)))}. "
            "Convert them, or clip them separately."
        )
    key = keys.pop() if keys else None
    return load(_ENTRIES["numpy" if key is None or key == _NUMBER else key]).backend(leaves, scalars)


def known(value: object) -> bool:
    """Say whether a value is an array of a framework or a Python number."""
    return _key_of(value) is not None


def all_known(values: Sequence[Any]) -> bool:
    """Say whether all values are arrays of frameworks or Python numbers."""
    return None not in _keys_of(values)


def all_numbers(values: Sequence[Any]) -> bool:
    """Say whether all values are Python numbers, and there is at least one."""
    return _keys_of(values) == {_NUMBER}


def entry_of(value: object) -> Entry | None:
    """Return the framework entry of an array; None for anything else, including numbers."""
    key = _key_of(value)
    return None if key is None else _ENTRIES.get(key)


def framework_of(value: object) -> "Framework | None":
    """Return the framework of an array; None for anything else, including numbers."""
    key = _key_of(value)
    return None if key not in _ENTRIES else load(_ENTRIES[key])


def entries_of(values: Iterable[Any]) -> list[Entry]:
    """Return the framework entries of all arrays among the values, in the registry's order."""
    keys = _keys_of(list(values))
    return [entry for key, entry in _ENTRIES.items() if key in keys]


def differentiating(values: Iterable[Any] = ()) -> Entry:
    """Return the first framework with derivatives among the values, or else the one that also takes NumPy arrays."""
    own = (entry for entry in entries_of(values) if entry.has_derivatives)
    return next(own, None) or next(e for e in _ENTRIES.values() if e.has_derivatives and e.takes_numpy)


def trees_of(leaves: Sequence[Any]) -> Trees | None:
    """Return a framework's tree functions if leaves are its arrays, or nodes that only it knows.

    Frameworks are asked only about leaves of unknown types, because `torch.compile` cannot trace those questions.
    """
    for key, entry in _ENTRIES.items():
        if entry.has_trees and sys.modules.get(key) is not None:
            keys = _keys_of(leaves)
            nodes = filter(_may_be_node, leaves) if None in keys and is_recent(key) else ()
            if key in keys or any(load(entry).trees.knows(leaf) for leaf in nodes):
                return load(entry).trees
    return None


def holding_gradients(leaves: Sequence[Any]) -> bool:
    """Say whether leaves are parameters with gradients. Always False while the call is being compiled."""
    kinds = set(map(type, leaves))
    for key, entry in _ENTRIES.items():
        module = _ready(key)
        kind: Any = None if entry.parameter is None or module is None else entry.parameter(module)
        if kind in kinds and not being_compiled():
            return any(leaf.grad is not None for leaf in leaves if type(leaf) is kind)
    return False


def being_compiled() -> bool:
    """Say whether a framework is tracing this call to compile it."""
    for key, entry in _ENTRIES.items():
        module = _ready(key)
        if entry.compiling is not None and module is not None and entry.compiling(module):
            return True
    return False


def recording() -> Entry | None:
    """Return the framework that records operations here, also of arrays that do not show that; None if none does."""
    for key, entry in _ENTRIES.items():
        module = _ready(key)
        if entry.recording is not None and module is not None and entry.recording(module):
            return entry
    return None


def number_in(scalar: object) -> Any:
    """Return the value of a scalar array as a Python number."""
    entry = entry_of(scalar)
    return scalar.item() if entry is None else load(entry).number(scalar)  # type: ignore[attr-defined]


def lies_itself(value: object) -> bool:
    """Say whether an array can be passed in place of a parameter and clipped in place itself, like NumPy's."""
    entry = entry_of(value)
    return entry is not None and load(entry).lies_itself(value)


def may_be_weights(value: object) -> bool:
    """Say whether an array that can be clipped in place looks like a model's weights."""
    entry = entry_of(value)
    return entry is not None and load(entry).may_be_weights(value)


def is_traced(array: object) -> bool:
    """Say whether an array has no values yet because the call is being traced."""
    entry = entry_of(array)
    return entry is not None and load(entry).is_traced(array)


def without_values(array: object) -> str | None:
    """Return a name for an array without values, such as a meta tensor; None for anything else."""
    entry = entry_of(array)
    return None if entry is None else load(entry).without_values(array)


def is_masked(value: object) -> bool:
    """Say whether a value is a NumPy masked array."""
    return isinstance(value, np.ndarray) and hasattr(value, "mask")


def models_of(value: object) -> Models | None:
    """Return what to pass instead of a model; None if the value is not a model."""
    return next((models for models in _all_models() if hasattr(value, models.attribute)), None)


def instead_of_parameters() -> str:
    """Return what to pass instead of something that is not a model's parameters."""
    return "; ".join(entry.models.parameters for entry in _ENTRIES.values() if entry.models and entry.has_derivatives)


def names_of_all(*, has_derivatives: bool = False) -> str:
    """Return the names of all frameworks, or of those with derivatives."""
    *others, last = [entry.name for entry in _ENTRIES.values() if entry.has_derivatives or not has_derivatives]
    return f"{', '.join(others)} or {last}"


def conversions(given: Entry) -> str:
    """Return the functions that convert a framework's arrays to those with derivatives, for errors."""
    found = " or ".join(sorted(entry.from_numpy for entry in _ENTRIES.values() if entry.from_numpy))
    return found if given.module == "numpy" else f"numpy.array, then with {found}"


def ways_to_examples() -> str:
    """Return the functions that compute per-example gradients, for errors."""
    *others, last = sorted(entry.per_example for entry in _ENTRIES.values() if entry.per_example)
    return f"{', '.join(others)} or {last}"


def _all_models() -> list[Models]:
    return [entry.models for entry in _ENTRIES.values() if entry.models is not None]


def _key_of(value: object) -> str | None:
    """Return the key of an array's framework, `_NUMBER` for a Python number, None for anything else."""
    kind = type(value)
    if kind not in _KEY_BY_TYPE:
        _KEY_BY_TYPE[kind] = _classify(value)
    return _KEY_BY_TYPE[kind]


def _keys_of(values: Sequence[Any]) -> set[str | None]:
    kinds = set(map(type, values))
    if kinds.difference(_KEY_BY_TYPE):
        _KEY_BY_TYPE.update({type(value): _classify(value) for value in values})
    return {_KEY_BY_TYPE[kind] for kind in kinds}


def _classify(value: object) -> str | None:
    # A masked array is also an `ndarray`, but the result would lose the mask.
    if is_masked(value):
        return None
    # NumPy first, because some of its scalars are also Python numbers.
    if isinstance(value, (np.ndarray, np.generic)):
        return "numpy"
    # In Python a boolean is an integer, but a boolean gradient is a mistake.
    if isinstance(value, (int, float, complex)) and not isinstance(value, bool):
        return _NUMBER
    for key, entry in _ENTRIES.items():
        module = sys.modules.get(key)
        if module is not None and isinstance(value, tuple(getattr(module, name, ()) for name in entry.arrays)):
            return key
    return None


def _ready(key: str) -> ModuleType | None:
    """Return a framework's module if it is imported and not too old."""
    return sys.modules.get(key) if is_recent(key) else None


def _may_be_node(leaf: object) -> bool:
    return _key_of(leaf) is None and not isinstance(leaf, (bool, np.ndarray, Iterator))


def _takes_over(scalar: object) -> bool:
    entry = entry_of(scalar)
    return entry is not None and (entry.takes_numpy or is_traced(scalar))


def _no_array(leaf: object, path: str) -> str:
    """Return the error message for a leaf that is not an array."""
    if is_masked(leaf):
        return (
            f"{path or 'the gradient'} is a masked array, and clipping would lose the mask. Pass x.filled(0) to count "
            "masked elements as zeros, or x.data to count their stored values."
        )
    return (
        f"a leaf of gradients must be an array of {names_of_all()}, got {typed(leaf)} at {path or 'the root'}."
        f"{_instead_of(leaf)}"
    )


def _instead_of(leaf: object) -> str:
    """Return the advice for a leaf that is not an array."""
    from gradclip._src.advice import how_to_convert  # loaded only after an error

    models = models_of(leaf)
    if models is not None:
        return f" For a module, pass {models.gradients}"
    if known(getattr(leaf, "value", None)):  # as a Keras variable does
        return " Pass its .value."
    return how_to_convert(leaf)


for _entry in ENTRIES:
    register(_entry)
find_trees_with(trees_of)
ask_whether_compiling(being_compiled)

"""The value of one example that `gradclip.integrations.jax_privacy` clips: its dtypes, norms, and what is left out."""

import re
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp

from gradclip._src.functional.clip import global_norm
from gradclip._src.passed.arguments import is_single_threshold
from gradclip._src.passed.leaves import as_floats, counted
from gradclip.typing import Thresholds

_WHOLE_EXAMPLES_SINCE = (2, 3)


def skips_whole_examples() -> bool:
    """Say whether the release in use leaves out an example with NaN or infinities, as jax-privacy does since 2.3.

    Before, only the elements that are not finite count as 0. Where jax-privacy is not installed, the newest rule holds.
    """
    found = _version()
    return found is None or found >= _WHOLE_EXAMPLES_SINCE


def _version() -> tuple[int, ...] | None:
    """Return the first two numbers of the version that is loaded, or else installed; None if there is none."""
    text = getattr(sys.modules.get("jax_privacy"), "__version__", None)
    if text is None:
        try:
            text = metadata.version("jax-privacy")
        except metadata.PackageNotFoundError:
            return None
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def widened(fun: Callable[..., Any], dtype: jax.typing.DTypeLike | None, has_aux: bool) -> Callable[..., Any]:
    """Make `fun` return results of at least the precision of `dtype`. Wider results keep their dtype."""
    if dtype is None:
        return fun

    def wide(*args: object, **kwargs: object) -> Any:
        result = fun(*args, **kwargs)
        value, *aux = result if has_aux else (result,)
        value = jax.tree.map(lambda x: cast(x, dtype, wider=True), value)
        return (value, *aux) if has_aux else value

    return wide


def cast(x: jax.Array, dtype: jax.typing.DTypeLike, *, wider: bool = False) -> jax.Array:
    """Return an array in a dtype, or in the wider of its own and that. `float0` holds no numbers and stays."""
    if x.dtype == jax.dtypes.float0:
        return x
    return x.astype(jnp.promote_types(x.dtype, dtype) if wider else dtype)


def norms_of(tree: object, thresholds: Thresholds) -> Any:
    """Return the norm of a tree, or of each part of it that has a threshold. Integers count."""
    flat = counted(as_floats(tree))
    if is_single_threshold(thresholds):
        return global_norm(flat.leaves)
    prefix, parts = flat.split_by(thresholds)
    return prefix.arrange([global_norm([flat.leaves[i] for i in part]) for part in parts])


def left_out_together(fun: Callable[..., Any], has_aux: bool, thresholds: Thresholds) -> Callable[..., Any]:
    """Make `fun` return zeros in place of all of a value that is not finite in one part.

    It returns `(value, (aux, norms))`, with the norm of each part of the value as it was.
    """

    def whole(*args: object, **kwargs: object) -> Any:
        result = fun(*args, **kwargs)
        value, aux = result if has_aux else (result, ())
        norms = norms_of(value, thresholds)
        flat = counted(as_floats(value))
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in flat.leaves]))
        return flat.rebuild([jnp.where(finite, x, jnp.zeros_like(x)) for x in flat.leaves]), (aux, norms)

    return whole

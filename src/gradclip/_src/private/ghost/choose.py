"""What a framework offers to measure gradients in factors. It is imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from gradclip._src.backends.entries import Entry

if TYPE_CHECKING:
    from gradclip._src.private.ghost.products import Products
    from gradclip._src.private.ghost.taps import Taps


class Tools(NamedTuple):
    """The taps of a framework, its products, and what gives a clipped sum a derivative, if sums have one."""

    taps: Taps
    products: type[Products]
    with_derivative: Callable[[Any, Any], Any] | None = None


def has_tools(framework: Entry) -> bool:
    """Say whether a framework offers any."""
    return framework.module in _OF


def tools_of(framework: Entry) -> Tools:
    """Return what a framework offers."""
    return _OF[framework.module]()


# Each function uses an import statement: `torch.compile` cannot trace any other kind of import.
def _jax() -> Tools:
    from gradclip._src.private.ghost.jax.derivative import with_derivative
    from gradclip._src.private.ghost.jax.matrices import JaxProducts
    from gradclip._src.private.ghost.jax.taps import JaxTaps

    return Tools(JaxTaps(), JaxProducts, with_derivative)


def _torch() -> Tools:
    from gradclip._src.private.ghost.torch.matrices import TorchProducts
    from gradclip._src.private.ghost.torch.taps import TorchTaps

    return Tools(TorchTaps(), TorchProducts)


_OF = {"jax": _jax, "torch": _torch}

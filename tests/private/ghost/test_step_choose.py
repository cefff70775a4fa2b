"""Which frameworks have taps."""

import pytest

from gradclip._src.backends.registry import named
from gradclip._src.private.ghost.step import has_tools, tools_of


@pytest.mark.parametrize(("framework", "known"), [("jax", True), ("torch", True), ("tensorflow", False)])
def test_frameworks_with_taps(framework, known):
    assert has_tools(named(framework)) == known


def test_what_a_framework_offers():
    jax, torch = (tools_of(named(name)) for name in ("jax", "torch"))
    assert (type(jax.taps).__name__, jax.products.__name__) == ("JaxTaps", "JaxProducts")
    assert (type(torch.taps).__name__, torch.products.__name__) == ("TorchTaps", "TorchProducts")
    # Sums in PyTorch are detached, with gradients that are made too.
    assert (jax.with_derivative is None, torch.with_derivative is None) == (False, True)

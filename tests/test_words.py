"""Errors about many leaves name ten of them, and say how many more there are."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.words import listed, warn_of_retired

COUNT = 3000
TREE = {f"layer{i}": np.full(2, np.nan) for i in range(COUNT)}
LONG = 2000


def named(keys, value=1.0):
    return dict.fromkeys(keys, value)


CALLS = {
    "raise": (
        lambda: gradclip.clip_by_global_norm(TREE, 1.0, nonfinite="raise"),
        f"in {COUNT} of {COUNT} leaves: .*; and {COUNT - 10} more",
    ),
    "raise in place": (lambda: gradclip.clip_grad_norm_(TREE, 1.0, nonfinite="raise"), f"and {COUNT - 10} more"),
    "raise in PyTorch": (
        lambda: gradclip.clip_by_global_norm([torch.tensor(np.nan)] * COUNT, 1.0, nonfinite="raise"),
        f"and {COUNT - 10} more",
    ),
    "other names": (
        lambda: gradclip.clip_by_layer_norm(TREE, named(f"other{i}" for i in range(COUNT))),
        f"a prefix of the tree .* and {COUNT - 10} more",
    ),
    "other names in JAX": (
        lambda: gradclip.clip_by_layer_norm(
            named(TREE, jnp.ones(1)), named((f"other{i}" for i in range(COUNT)), jnp.ones(()))
        ),
        f"a prefix of the tree .* and {COUNT - 10} more",
    ),
    "other containers": (lambda: gradclip.clip_by_layer_norm(TREE, [1.0] * COUNT), "and 2990 more"),
    "a tree of thresholds": (lambda: gradclip.clip_by_global_norm(TREE, TREE), "max_norm must be a real number"),
    "batches": (
        lambda: gradclip.per_example_clip({key: np.ones(i % 7) for i, key in enumerate(TREE)}, 1.0),
        "the shapes are .* and [0-9]+ more. ",
    ),
    "arguments": (
        lambda: gradclip.clipped_grad(lambda p, x: (p * x["layer0"]).sum(), 1.0)(
            torch.ones(2), {key: torch.ones(3 if key == "layer2000" else 4, 2) for key in TREE}
        ),
        r"the shapes are argument 1\['layer0'\] \(4, 2\), argument 1\['layer2000'\] \(3, 2\), .* and 2990 more",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_errors_are_short(name):
    call, message = CALLS[name]
    with pytest.raises((ValueError, TypeError, FloatingPointError), match=message) as raised:
        call()
    assert len(str(raised.value)) < LONG


def test_ten_are_listed_in_full():
    assert listed([str(i) for i in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7, 8, 9"
    assert listed([str(i) for i in range(12)], "; ").endswith("; 9; and 2 more")
    assert listed([]) == ""


def test_a_retired_name_warns_where_it_is_used():
    with pytest.warns(
        DeprecationWarning, match=r"^gradclip\.old is retired and goes in 0\.4\. Use gradclip\.new\.$"
    ) as told:
        warn_of_retired("old", "new", "0.4")
    assert told[0].filename == __file__

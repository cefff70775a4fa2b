"""Public functions on all kinds of TensorFlow gradients, eager and in graphs: what the page promises, and no more."""

import inspect
import re
from pathlib import Path

import pytest
import tensorflow as tf

import gradclip

pytestmark = pytest.mark.xdist_group("tensorflow")
PAGE = Path(__file__).parents[3] / "docs/tensorflow.md"
VALUES = [[3.0, 4.0], [1.0, 2.0]]

KINDS = {
    "`tf.Tensor`": lambda: tf.constant(VALUES),
    "`tf.Variable`": lambda: tf.Variable(VALUES, trainable=False),
    "`tf.IndexedSlices`": lambda: tf.IndexedSlices(tf.constant(VALUES), tf.constant([1, 1]), tf.constant([5, 2])),
}
CALLS = {
    "global_norm": gradclip.global_norm,
    "layer_norms": gradclip.layer_norms,
    "clip_by_global_norm": lambda tree: gradclip.clip_by_global_norm(tree, 1.0),
    "clip_by_layer_norm": lambda tree: gradclip.clip_by_layer_norm(tree, 1.0),
    "clip_by_value": lambda tree: gradclip.clip_by_value(tree, 1.0),
    "clip_by_unit_norm": lambda tree: gradclip.clip_by_unit_norm(tree, 1.0),
    "adaptive_grad_clip": lambda tree: gradclip.adaptive_grad_clip(tree, [tf.ones([2, 2])]),
    "per_example_clip": lambda tree: gradclip.per_example_clip(tree, 1.0),
    "partial_norm": lambda tree: gradclip.partial_norm(tree).clip(tree, 1.0),
    "norm_at_most": lambda tree: gradclip.norm_at_most(tree, 1.0),
    "check_update": lambda tree: gradclip.check_update(tree, 1.0),
    "grad_norm": gradclip.grad_norm,
    "clip_grad_norm_": lambda tree: gradclip.clip_grad_norm_(tree, 1.0),
    "clip_grad_value_": lambda tree: gradclip.clip_grad_value_(tree, 1.0),
    "clip_grad_layer_norm_": lambda tree: gradclip.clip_grad_layer_norm_(tree, 1.0),
    "clip_grad_unit_norm_": lambda tree: gradclip.clip_grad_unit_norm_(tree, 1.0),
    "adaptive_grad_clip_": lambda tree: gradclip.adaptive_grad_clip_(tree, params=[tf.ones([2, 2])]),
}
# These take no gradients, or sums over examples.
OTHERS = {"add_noise", "audited_epsilon", "check_sensitivity", "clipped_fun", "clipped_grad", "clipped_sum_sensitivity"}
OTHERS |= {"clip_at_step", "clip_update_at_step", "explain_spike", "find_max_norm", "guard", "native_status"}
CASES = [(name, kind) for name in CALLS for kind in KINDS]


def promised() -> dict[str, dict[str, str]]:
    """Return the page's table: function, column, yes or no."""
    lines = re.search(r"^\| function \|.*?(?=\n\n)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines())
    return {
        name: dict(zip(head[1:], cells, strict=True))
        for names, *cells in rows
        for name in re.findall(r"`(\w+)`", names)
    }


def test_the_page_speaks_of_every_function():
    functions = {name for name in gradclip.__all__ if inspect.isfunction(getattr(gradclip, name))}
    assert set(promised()) == set(CALLS) == functions - OTHERS


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_function_takes_what_the_page_says(name, kind):
    def in_graph():
        CALLS[name]([made if kind == "`tf.Variable`" else KINDS[kind]()])
        return tf.zeros([])

    row, made = promised()[name], KINDS[kind]()
    for works, call in (
        (row[kind], lambda: CALLS[name]([made])),
        ("yes" if row[kind] == row["in `tf.function`"] == "yes" else "no", tf.function(in_graph, autograph=False)),
    ):
        if works == "yes":
            call()
            continue
        with pytest.raises((TypeError, ValueError), match=r"\. (Pass|Call|For)|, or "):
            call()

"""Try which function works where, and write the table into docs/support.md: `python scripts/support_table.py`."""

import re
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import mlx.core as mx
import numpy as np
import torch._dynamo  # loads Triton, which after TensorFlow would end the process

# isort: split
import tensorflow as tf

import gradclip

PAGE = Path(__file__).parent.parent / "docs" / "support.md"
MARKS = ("<!-- table: written by scripts/support_table.py -->\n", "<!-- end of table -->")
BATCH = np.array([[3.0, 4.0], [0.3, -0.4], [6.0, 8.0]], np.float32)
TREE_FUNCTIONS = {
    "global_norm": lambda x: gradclip.global_norm({"x": x}),
    "layer_norms": lambda x: gradclip.layer_norms({"x": x})["x"],
    "clip_by_global_norm": lambda x: gradclip.clip_by_global_norm({"x": x}, 1.0)[0]["x"],
    "clip_by_layer_norm": lambda x: gradclip.clip_by_layer_norm({"x": x}, 1.0)[0]["x"],
    "clip_by_unit_norm": lambda x: gradclip.clip_by_unit_norm({"x": x}, 1.0, unit_axis=0)[0]["x"],
    "adaptive_grad_clip": lambda x: gradclip.adaptive_grad_clip({"x": x}, {"x": x}, clipping=0.3, unit_axis=0)[0]["x"],
    "clip_by_value": lambda x: gradclip.clip_by_value({"x": x}, 1.0)["x"],
    "per_example_clip": lambda x: gradclip.per_example_clip({"x": x}, 1.0)[0]["x"],
}
IN_PLACE = {
    "grad_norm": gradclip.grad_norm,
    "clip_grad_norm_": lambda p: gradclip.clip_grad_norm_(p, 1.0),
    "clip_grad_layer_norm_": lambda p: gradclip.clip_grad_layer_norm_(p, 1.0),
    "clip_grad_unit_norm_": lambda p: gradclip.clip_grad_unit_norm_(p, 1.0, unit_axis=0),
    "adaptive_grad_clip_": lambda p: gradclip.adaptive_grad_clip_(p, 0.3, params=[p[0].grad], unit_axis=0),
    "clip_grad_value_": lambda p: gradclip.clip_grad_value_(p, 1.0),
}
OF_TORCH = ("PyTorch", "torch.compile", "torch.func", "autograd")
OF_JAX = ("JAX", "jax.jit", "jax.vmap", "jax.grad")
OF_TENSORFLOW = ("TensorFlow", "tf.function", "XLA", "tf.vectorized_map", "tf.GradientTape")
OF_MLX = ("MLX", "mx.compile", "mx.vmap", "mx.grad")
# One table for each: all columns side by side are wider than a page.
TABLES = {"NumPy and PyTorch": ("NumPy", *OF_TORCH), "JAX": OF_JAX, "TensorFlow": OF_TENSORFLOW, "MLX": OF_MLX}
COLUMNS = tuple(column for columns in TABLES.values() for column in columns)
DERIVATIVES = ("autograd", "jax.grad", "tf.GradientTape", "mx.grad")


def _sums(function, xp):
    return lambda x: xp.sum(function(x))


def _stacked(batch):
    return np.stack([batch, batch[::-1]])


def _autograd(function):
    def gradient(x):
        x.requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]

    return gradient


def _tape(function):
    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(function(x))
        return tape.gradient(value, x)

    return gradient


def calls(function):
    """Return, for each column, a call on the batch and its expected result."""
    plain = np.asarray(function(BATCH))
    tensor, tensors = tf.constant(BATCH), tf.constant(_stacked(BATCH))
    stacked = np.stack([np.asarray(function(x)) for x in _stacked(BATCH)])
    compiled = lambda: torch.compile(function, backend="eager", fullgraph=True)(torch.tensor(BATCH))
    array, arrays = mx.array(BATCH), mx.array(_stacked(BATCH))
    derivative = lambda: jax.grad(_sums(function, jnp))(jnp.array(BATCH))
    return {
        "NumPy": (lambda: function(BATCH), plain),
        "PyTorch": (lambda: function(torch.tensor(BATCH)), plain),
        "torch.compile": (compiled, plain),
        "torch.func": (lambda: torch.func.vmap(function)(torch.tensor(_stacked(BATCH))), stacked),
        "autograd": (lambda: _autograd(function)(torch.tensor(BATCH)), numerical(function)),
        "JAX": (lambda: function(jnp.array(BATCH)), plain),
        "jax.jit": (lambda: jax.jit(function)(jnp.array(BATCH)), plain),
        "jax.vmap": (lambda: jax.vmap(function)(jnp.array(_stacked(BATCH))), stacked),
        "jax.grad": (derivative, numerical(function)),
        "TensorFlow": (lambda: function(tensor), plain),
        "tf.function": (lambda: tf.function(function)(tensor), plain),
        "XLA": (lambda: tf.function(function, jit_compile=True)(tensor), plain),
        "tf.vectorized_map": (lambda: tf.vectorized_map(function, tensors), stacked),
        "tf.GradientTape": (lambda: _tape(function)(tensor), numerical(function)),
        "MLX": (lambda: function(array), plain),
        "mx.compile": (lambda: mx.compile(function)(array), plain),
        "mx.vmap": (lambda: mx.vmap(function)(arrays), stacked),
        "mx.grad": (lambda: mx.grad(_sums(function, mx))(array), numerical(function)),
    }


def numerical(function):
    """Return the gradient of the summed results, by central differences in float64."""
    x = BATCH.astype(np.float64)
    gradient = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        moved = np.zeros_like(x)
        moved[index] = 1e-6
        gradient[index] = (np.sum(function(x + moved)) - np.sum(function(x - moved))) / 2e-6
    return gradient


def works(call, expected, tolerance=1e-6):
    try:
        got = np.asarray(call())
    except Exception:
        return False
    return got.shape == expected.shape and np.allclose(got, expected, rtol=tolerance, atol=tolerance)


def in_place_works(function, make):
    reference = SimpleNamespace(grad=BATCH.copy())
    function([reference])
    tried = SimpleNamespace(grad=make(BATCH.copy()))
    function([tried])
    return np.allclose(np.asarray(tried.grad), reference.grad, rtol=1e-6)


def rows():
    for name, function in TREE_FUNCTIONS.items():
        found = calls(function)
        yes = {c: works(*found[c], 2e-4 if c in DERIVATIVES else 1e-6) for c in COLUMNS}
        yield name, {c: "yes" if yes[c] else "no" for c in COLUMNS}
    makers = {
        "NumPy": lambda x: x,
        "PyTorch": torch.tensor,
        "JAX": jnp.array,
        "TensorFlow": tf.constant,
        "MLX": mx.array,
    }
    for name, function in IN_PLACE.items():
        cells = {c: "yes" if in_place_works(function, make) else "no" for c, make in makers.items()}
        yield name, {c: cells.get(c, "–") for c in COLUMNS}


def table():
    found = list(rows())
    return "\n".join(_table(title, columns, found) for title, columns in TABLES.items())


def _table(title, columns, found):
    lines = [f"## {title}", "", f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| `{name}` | {' | '.join(cells[c] for c in columns)} |" for name, cells in found]
    return "\n".join(lines) + "\n"


def current():
    text = PAGE.read_text()
    return text[text.index(MARKS[0]) + len(MARKS[0]) : text.index(MARKS[1])]


if __name__ == "__main__":
    PAGE.write_text(re.sub(f"({MARKS[0]}).*?({MARKS[1]})", rf"\g<1>{table()}\2", PAGE.read_text(), flags=re.S))

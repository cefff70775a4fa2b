"""Time clipping of TensorFlow tensors, compared with TensorFlow's own: eager, in `tf.function` and compiled by XLA.

Tensors are float32. "norm" measures the global norm; the others clip by it.
"""

import os
import random

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from report import GRAPHS, parser, rows, show, write_measured
from timing import medians
from workloads import WORKLOADS

import gradclip

CASES = {"norm": None, "not clipped": 1e12, "clipped": 1.0}
MODES = ("eager", "tf.function", "XLA")
SHAPES = {
    "1 of 64": [(64,)],
    "150 of 64": [(64,)] * 150,
    "one of 1 M": [(1_000_000,)],
    "ResNet-50": WORKLOADS["ResNet-50"],
}


def contenders(mode, tensors, max_norm):
    def recorded(function):
        call = function if mode == "eager" else tf.function(function, jit_compile=mode == "XLA")

        def waited_for():
            found = call(tensors)
            tf.nest.flatten(found)[-1].numpy()
            return found

        return waited_for

    if max_norm is None:
        return {
            "gradclip.global_norm": recorded(gradclip.global_norm),
            "tf.linalg.global_norm": recorded(tf.linalg.global_norm),
        }
    return {
        "gradclip.clip_by_global_norm": recorded(lambda xs: gradclip.clip_by_global_norm(xs, max_norm)),
        "tf.clip_by_global_norm": recorded(lambda xs: tf.clip_by_global_norm(xs, max_norm)),
    }


def main():
    options = parser(__doc__, GRAPHS, "small tensors alone").parse_args()
    random.seed(0)
    found = []
    for name, shapes in list(SHAPES.items())[: 2 if options.quick else None]:
        tensors = [tf.random.stateless_normal(shape, (0, number)) for number, shape in enumerate(shapes)]
        for mode in MODES:
            for case, max_norm in CASES.items():
                described = {"workload": name, "mode": mode, "case": case}
                some = rows(described, medians(contenders(mode, tensors, max_norm), options.repeats, options.seconds))
                show(f"{name}, {mode}", some)
                found += some
    write_measured({"tensorflow": tf.__version__, "repeats": options.repeats, "rows": found}, options)


if __name__ == "__main__":
    main()

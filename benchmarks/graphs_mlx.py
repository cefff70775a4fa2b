"""Time clipping of MLX arrays on the CPU, compared with MLX's own: eager, and compiled by `mx.compile`."""

import random

import mlx.core as mx
import mlx.optimizers
from mlx.utils import tree_flatten
from report import GRAPHS_MLX, parser, rows, show, write_measured
from timing import medians
from workloads import WORKLOADS

import gradclip.integrations.mlx

CASES = {"not clipped": 1e12, "clipped": 1.0}
SHAPES = {
    "150 of 64": [(64,)] * 150,
    "ResNet-50": WORKLOADS["ResNet-50"],
}
CLIP = {"gradclip": gradclip.integrations.mlx.clip_grad_norm, "mlx": mlx.optimizers.clip_grad_norm}


def contenders(mode, arrays, max_norm):
    def evaluated(clip):
        def function(tree):
            return clip(tree, max_norm)

        call = function if mode == "eager" else mx.compile(function)

        def waited_for():
            found = call(arrays)
            mx.eval(*(leaf for _, leaf in tree_flatten(found)))
            return found

        return waited_for

    return {f"{name}.clip_grad_norm": evaluated(clip) for name, clip in CLIP.items()}


def main():
    options = parser(__doc__, GRAPHS_MLX, "small arrays alone").parse_args()
    random.seed(0)
    found = []
    with mx.stream(mx.cpu):
        for name, shapes in list(SHAPES.items())[: 1 if options.quick else None]:
            for dtype in (mx.float32, mx.bfloat16):
                arrays = [mx.random.normal(shape, key=mx.random.key(n)).astype(dtype) for n, shape in enumerate(shapes)]
                mx.eval(arrays)
                for mode in ("eager", "compiled"):
                    kind = f"{mode}, {str(dtype).rpartition('.')[2]}"
                    for case, max_norm in CASES.items():
                        described = {"workload": name, "mode": kind, "case": case}
                        times = medians(contenders(mode, arrays, max_norm), options.repeats, options.seconds)
                        some = rows(described, times)
                        show(f"{name}, {kind}", some)
                        found += some
    write_measured({"mlx": mx.__version__, "repeats": options.repeats, "rows": found}, options)


if __name__ == "__main__":
    main()

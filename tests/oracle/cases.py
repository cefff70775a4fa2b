"""The table of all cases: which functions are called by which engines, and how often."""

from oracle import examples, integrations, steps, thresholds, trees
from oracle.given import THRESHOLDS, Case

EAGER = {"numpy": 128, "torch": 128, "jax": 60, "jax-x64": 24, "tensorflow": 64, "torch-device": 96}
COMPILED = {"jax-jit": 36, "jax-x64-jit": 12, "tf-function": 24}
IN_PLACE = {"numpy": 128, "torch": 200, "jax": 48, "jax-x64": 12, "tensorflow": 48, "torch-device": 128}
WITH_GRADIENTS = {"torch": 64, "jax": 24, "tensorflow": 16}
FEW_THRESHOLDS = ("number",) * 8 + ("zero", "inf", "negative", "scalar")

FOLLOWING = {"numpy": 48, "torch": 64, "torch-device": 48, "jax": 18, "tensorflow": 16}
IN_JAX = {"jax": 48, "jax-x64": 12, "jax-jit": 30}
OTHERS = (
    (thresholds.CALLS, FOLLOWING),
    (thresholds.RULES, {"numpy": 64, "torch": 32, "jax": 18, "tensorflow": 16, "jax-jit": 18}),
    (thresholds.SELF_TEST, {"numpy": 16, "torch": 8, "jax": 4}),
    (steps.CALLS, {"torch": 96}),
    (integrations.TORCH, {"torch": 96, "torch-device": 32}),
    (integrations.EAGER_AND_JIT, IN_JAX),
    ({"integrations.tensorflow": integrations.tensorflow_names}, {"tensorflow": 96}),
    ({"integrations.lucid": integrations.lucid_names}, {"numpy": 48, "torch": 48, "jax": 18}),
    ({"integrations.declearn": integrations.declearn_names}, {"numpy": 48}),
    ({"sparse": integrations.sparse_gradients}, {"torch": 48, "jax": 48, "tensorflow": 48}),
)


def table():
    """Return the calls with their engines, numbers of cases and kinds of thresholds, by function."""
    found = {name: (call, EAGER | COMPILED, THRESHOLDS) for name, call in trees.CALLS.items()}
    found |= {name: (call, EAGER, THRESHOLDS) for name, call in trees.ONLY_EAGER.items()}
    found |= {name: (call, IN_PLACE, THRESHOLDS) for name, call in trees.IN_PLACE.items()}
    found["per_example_clip"] = (examples.per_example_clip, EAGER | COMPILED, THRESHOLDS)
    for name in ("clipped_grad", "clipped_fun"):
        found[name] = (examples.CALLS[name], WITH_GRADIENTS, FEW_THRESHOLDS)
    found["clipped_sum_sensitivity"] = (examples.clipped_sum_sensitivity, {"numpy": 128}, FEW_THRESHOLDS)
    for calls, engines in OTHERS:
        found |= {name: (call, engines, FEW_THRESHOLDS) for name, call in calls.items()}
    return found


def cases(functions=None):
    """Yield each case and its call."""
    for name, (call, engines, kinds) in (functions or table()).items():
        for engine, count in engines.items():
            for index in range(count):
                yield Case.drawn(name, engine, index, kinds), call

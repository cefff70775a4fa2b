"""The table of all cases: which functions are called by which engines, and how often."""

from oracle import sparse, thresholds, trees
from oracle.given import THRESHOLDS, Case

EAGER = {"numpy": 24, "torch": 24, "jax": 18, "jax-x64": 6, "tensorflow": 16, "torch-device": 16}
COMPILED = {"jax-jit": 12, "jax-x64-jit": 6, "tf-function": 8}
IN_PLACE = {"numpy": 24, "torch": 32, "jax": 18, "jax-x64": 6, "tensorflow": 16, "torch-device": 24}
FOLLOWING = {"numpy": 16, "torch": 16, "torch-device": 16, "jax": 6, "tensorflow": 8}
SPARSE = {"torch": 24, "jax": 24, "tensorflow": 24}
FEW_THRESHOLDS = ("number",) * 8 + ("zero", "inf", "negative", "scalar")


def table():
    """Return the calls with their engines, numbers of cases and kinds of thresholds, by function."""
    found = {name: (call, EAGER | COMPILED, THRESHOLDS) for name, call in trees.CALLS.items()}
    found |= {name: (call, EAGER, THRESHOLDS) for name, call in trees.ONLY_EAGER.items()}
    found |= {name: (call, IN_PLACE, THRESHOLDS) for name, call in trees.IN_PLACE.items()}
    found |= {name: (call, FOLLOWING, FEW_THRESHOLDS) for name, call in thresholds.CALLS.items()}
    return found | {"sparse": (sparse.sparse_gradients, SPARSE, FEW_THRESHOLDS)}


def cases(functions=None):
    """Yield each case and its call."""
    for name, (call, engines, kinds) in (functions or table()).items():
        for engine, count in engines.items():
            for index in range(count):
                yield Case.drawn(name, engine, index, kinds), call

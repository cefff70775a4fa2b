"""A case: which function is called on what, how it is drawn from its number, and its outcome."""

import math
import warnings
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from oracle import drawing, outcome
from oracle.engines import ENGINES, Engine

ORDERS = (2,) * 8 + (1, 1, 3, 3, math.inf, math.inf, -math.inf, 2.5, None, "inf", "-inf", 0.5)
POLICIES = ("propagate", "propagate", "zero", "drop", "drop", "raise")
THRESHOLDS = ("number",) * 8 + ("scalar",) * 3 + ("zero", "inf", "whole", "wrong")
MIXED = ("float32", "bfloat16", "float16", "float64", "complex64")
HOLDERS = (
    "list",
    "list",
    "list",
    "frozen",
    "names",
    "pairs",
    "generator",
    "groups",
    "single",
    "twice",
    "shared",
    "tree",
)


@dataclass(frozen=True)
class Case:
    """One call. All that is not in its name is drawn from its name."""

    function: str
    framework: str
    dtype: str
    ord: Any
    nonfinite: str
    threshold: str
    values: str
    index: int

    @classmethod
    def drawn(cls, function, framework, index, thresholds=THRESHOLDS):
        rng = drawing.generator(f"{function}/{framework}/{index}")
        dtypes = ENGINES[framework].dtypes
        return cls(
            function,
            framework,
            dtypes[index % len(dtypes)],
            drawing.one_of(rng, ORDERS),
            drawing.one_of(rng, POLICIES[:-1] if ENGINES[framework].compiled and index % 8 else POLICIES),
            drawing.one_of(rng, thresholds),
            drawing.one_of(rng, drawing.VALUES),
            index,
        )

    @property
    def name(self):
        said = (self.function, self.framework, self.dtype, f"ord={self.ord}", self.nonfinite, self.threshold)
        return "/".join((*said, self.values, str(self.index)))

    def outcome(self, function):
        """Return what the function gives, or raises, with the inputs as they are afterwards."""
        given = Given(self, ENGINES[self.framework])
        with given.engine.mode(), np.errstate(all="ignore"), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            warnings.filterwarnings("ignore", "Sparse invariant checks")  # torch says it once in a process
            given.draw()
            try:
                result = function(given)
            except Exception as error:
                if outcome.raised_here(error):
                    raise
                result = error
            found = {
                "result": outcome.described(result),
                "inputs": outcome.described(given.held()),
                "warnings": outcome.described_warnings(told),
            }
        return found


@dataclass
class Given:
    """What a case's function gets."""

    case: Case
    engine: Engine
    rng: Any = field(init=False)
    leaves: list = field(init=False, default_factory=list)
    arrays: list = field(init=False, default_factory=list)
    holders: list = field(init=False, default_factory=list)
    container: str = field(init=False, default="list")

    def __post_init__(self):
        self.rng = drawing.generator(self.case.name)

    def draw(self):
        """Draw the leaves: several of one kind where each case is compiled."""
        shapes = self._shapes()
        dtypes = self._dtypes(len(shapes))
        layout = drawing.one_of(self.rng, drawing.LAYOUTS) if not self.engine.compiled else "plain"
        self.container = drawing.one_of(self.rng, drawing.CONTAINERS)
        for run in range(self.engine.runs):
            kind = self.case.values if run == 0 else drawing.one_of(self.rng, drawing.VALUES)
            spoiled = self.rng.randint(max(len(shapes), 1))
            kinds = [
                kind if kind not in ("nan", "inf") or place == spoiled else "ordinary" for place in range(len(shapes))
            ]
            drawn = [drawing.leaf(self.rng, *one) for one in zip(dtypes, shapes, kinds, strict=True)]
            self.leaves.append([drawing.laid_out(one, layout) for one in drawn])
            self.arrays.append([self.engine.from_numpy(one) for one in self.leaves[-1]])

    def _shapes(self):
        count = drawing.one_of(self.rng, (1, 1, 1, 2, 2, 2, 3, 3, 3, 5, 5, 40, 0))
        if self.engine.compiled:
            count = min(count, 3)
        shapes = [drawing.one_of(self.rng, drawing.SHAPES) for _ in range(count)]
        if shapes and not self.engine.compiled and self.rng.randint(12) == 0:
            # PyTorch adds up long arrays in as many parts as it has threads.
            shapes[0] = drawing.one_of(self.rng, drawing.LONG if self.engine.any_machine else drawing.LONG[-1:])
        return shapes

    def _dtypes(self, count):
        of = self.case.dtype
        if of == "mixed":
            narrow = [one for one in MIXED if one in self.engine.dtypes or one == "float32"]
            return [drawing.one_of(self.rng, narrow) for _ in range(count)]
        if of == "integer":
            whole = ("int32", "bool", "float32", "float32")
            return [drawing.one_of(self.rng, whole) for _ in range(count)]
        return [of] * count

    @property
    def real_dtype(self):
        """A real floating-point dtype: the case's own, if that is one."""
        of = drawing.real_part(self.case.dtype)
        return of if of in drawing.EXPONENTS else "float32"

    @property
    def trees(self):
        return [drawing.in_container(arrays, self.container) for arrays in self.arrays]

    @property
    def tree(self):
        return self.trees[0]

    def number(self):
        """Draw a number for a threshold."""
        return drawing.threshold(self.rng, self.case.threshold, drawing.largest(self.leaves[0]))

    def max_norm(self):
        """Draw a threshold: a number, or a scalar of the framework."""
        number = self.number()
        return self.scalar(number) if self.case.threshold == "scalar" else number

    def scalar(self, number):
        narrow = "float32" in self.engine.dtypes and self.rng.randint(3)
        return self.engine.from_numpy(np.array(number, np.float32 if narrow else np.float64))

    def options(self):
        return {"ord": self.case.ord, "nonfinite": self.case.nonfinite}

    def parameters(self, kinds=HOLDERS):
        """Return holders of the gradients, in one of the forms that users pass."""
        kind = drawing.one_of(self.rng, kinds)
        arrays = self.arrays[0]
        if kind == "tree" and self.case.framework == "numpy":
            return self.tree
        if kind == "shared" and arrays and arrays[0].shape and self.case.framework.startswith(("numpy", "torch")):
            arrays = [*arrays, arrays[0][:3]]
        self.holders = [self.holder(one) for one in arrays]
        if kind == "frozen":
            self.holders.insert(self.rng.randint(len(arrays) + 1), self.holder(None))
        return self._in_form(kind)

    def _in_form(self, kind):
        names = [f"layer{index}" for index in range(len(self.holders))]
        forms = {
            "names": lambda: dict(zip(names, self.holders, strict=True)),
            "pairs": lambda: list(zip(names, self.holders, strict=True)),
            "generator": lambda: iter(self.holders),
            "groups": lambda: [{"params": self.holders[:1]}, {"params": self.holders[1:]}],
            "single": lambda: self.holders[0] if len(self.holders) == 1 else self.holders,
            "twice": lambda: [*self.holders, *self.holders[:1]],
        }
        return forms.get(kind, lambda: list(self.holders))()

    def holder(self, gradient):
        """Return a parameter with this gradient, if the framework has one."""
        if not self.case.framework.startswith("torch"):
            return SimpleNamespace(grad=gradient)
        import torch

        if gradient is None:
            return torch.nn.Parameter(torch.zeros(3))
        if not (gradient.is_floating_point() or gradient.is_complex()):
            return SimpleNamespace(grad=gradient)
        made = torch.nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        made.grad = gradient
        return made

    def held(self):
        """Return the inputs as they are now."""
        return [self.arrays, [one.grad for one in self.holders]]

"""What a clipped function is asked to do, checked when it is made, and the sensitivity that it promises."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from gradclip._src.annotations import Method, Relation, SumDtype, Thresholds, Unit
from gradclip._src.core.formats import SUPPORTED, bare_name, format_named
from gradclip._src.core.layouts import EXAMPLE, real_numbers
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.passed.arguments import check_flag
from gradclip._src.private.batching.verbs import Function
from gradclip._src.private.sums.call_arguments import needed_positions, not_said, others_than, positions
from gradclip._src.private.sums.layout import SumLayout, as_layout
from gradclip._src.private.sums.microbatches import MOST, Memory, as_microbatch_size, promise_for, whole_program
from gradclip._src.private.sums.rounding import ASSUMED_ELEMENTS, FactoredGradients
from gradclip._src.private.sums.sensitivity import Sensitivity, sensitivity_of
from gradclip._src.private.sums.settings import (
    PerExampleSettings,
    as_count,
    as_divisor,
    as_number_of_examples,
    check_function,
    check_name,
)
from gradclip._src.public import public
from gradclip._src.words import listed, shown

_SEVERAL_TERMS = 2


class ObservedGradients:
    """The largest gradient of an example and the narrowest dtype so far, and what a sensitivity assumed before."""

    def __init__(self) -> None:
        self._elements = 0
        self._narrowest: str | None = None
        self._assumed_elements: int | None = None
        self._assumed_dtype = False
        self._checked_use = False
        self._smallest_microbatch: int | None = None
        self._factors: int | None = None
        self._promised_factors = _SEVERAL_TERMS

    def noted_size(self, size: int) -> int:
        """Record the number of examples in a microbatch, and return it."""
        self._smallest_microbatch = min(size, self._smallest_microbatch or size)
        return size

    def note_plan(self, *, ghost: bool, cancels: bool) -> None:
        """Record whether gradients of a call come in factors, and whether those may cancel; warn if that is new."""
        self._factors = max(self._factors or 0, _SEVERAL_TERMS if cancels else int(ghost))
        if self._factors > self._promised_factors:
            self._promised_factors = _SEVERAL_TERMS
            warnings.warn(
                "sensitivity() was called when fewer gradients came in factors than in this batch. Call sensitivity() "
                "again, or pass method='materialize' to clipped_grad.",
                RuntimeWarning,
                stacklevel=3,
            )

    def factors(self, examples: int | None) -> FactoredGradients | None:
        """Return what a sensitivity must assume of gradients in factors, of so many examples at a time.

        Before the first call, that all are.
        """
        self._promised_factors = _SEVERAL_TERMS if self._factors is None else self._factors
        return FactoredGradients(examples, self._promised_factors == _SEVERAL_TERMS) if self._promised_factors else None

    def microbatches(self, size: int | Memory | None, count: int | None) -> int:
        """Return the most microbatches of a batch of `count` examples. Those of unknown size hold one example."""
        if isinstance(size, Memory):
            size = self._smallest_microbatch or 1
        return -(-count // size) if count and size else 1

    def check_used(self, unused: Callable[[], Sequence[str]], called: str) -> None:
        """Warn in the first call about parameters that the function does not use: their gradients are zero.

        `called`: the call that runs a module with given parameters, for the warning.
        """
        if self._checked_use:
            return
        self._checked_use = True
        names = unused()
        if names:
            warnings.warn(
                f"the function does not use {listed(names)}: these gradients are zero, and nothing is learned. "
                f"Compute with the parameters that are passed in, as {called}, not with those of an enclosing module.",
                UserWarning,
                stacklevel=3,
            )

    def note(self, leaves: Iterable[Any]) -> None:
        """Record the leaves of a call, batch on axis 0; warn if `sensitivity()` assumed less.

        That is, fewer elements, or a wider dtype.
        """
        leaves = list(leaves)
        names = [name for name in (bare_name(leaf.dtype) for leaf in leaves) if name in SUPPORTED]
        self._elements = max(self._elements, real_numbers(leaves, EXAMPLE))
        known = names if self._narrowest is None else [*names, self._narrowest]
        self._narrowest = min(known, key=lambda name: format_named(name).precision, default=None)
        narrow = self._narrowest is not None and format_named(self._narrowest).precision < 24
        if self._elements > (self._assumed_elements or math.inf) or (self._assumed_dtype and narrow):
            self._assumed_elements, self._assumed_dtype = None, False
            warnings.warn(
                f"sensitivity() was called before the first batch and assumed at most {ASSUMED_ELEMENTS} elements and "
                f"results in float32. This batch has {self._elements} elements per example, the narrowest of them "
                f"{self._narrowest}. Call sensitivity() again after a batch, or pass "
                "layout=gradclip.SumLayout(elements=..., partial_sums_in=...).",
                RuntimeWarning,
                stacklevel=2,
            )

    def layout(self, given: SumLayout, microbatches: int, added_in: SumDtype | None) -> SumLayout:
        """Return a layout with what it leaves open: the most elements of any call, and what the function does."""
        if given.elements is None and not self._elements:
            self._assumed_elements = ASSUMED_ELEMENTS
        return replace(
            given,
            elements=given.elements or self._elements or None,
            microbatches=given.microbatches or microbatches,
            partial_sums_in=given.partial_sums_in or added_in,
        )

    def narrowest(self) -> str:
        """Return the narrowest real dtype so far, or float32 before the first call."""
        self._assumed_dtype |= self._narrowest is None
        return format_named(self._narrowest or "float32").name


F = TypeVar("F", bound="FunctionSettings")
METHODS = ("auto", "materialize", "ghost", "loop")


@public
@dataclass(frozen=True, eq=False, repr=False)
class FunctionSettings:
    """The settings of a clipped function. `gradclip.clipped_grad` and `gradclip.clipped_fun` document them.

    With `argnums=None` the function clips results of `fun` instead of gradients.
    """

    fun: Function
    _settings: PerExampleSettings
    argnums: int | tuple[int, ...] | None
    batch_argnums: tuple[int, ...]
    has_aux: bool = False
    keep_batch_dim: bool = True
    return_values: bool = False
    return_norms: bool = False
    pre_clipping_transform: Callable[[Any], Any] | None = None
    microbatch_size: int | Memory | None = None
    pad_to: int | None = None
    normalize_by: float = 1.0
    prng_argnum: int | None = None
    unit: Unit = "example"
    method: Method = "auto"
    _assumed: bool = False  # batch_argnums was left out
    _observed: ObservedGradients = field(default_factory=ObservedGradients, init=False, repr=False)

    def __repr__(self) -> str:
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name[0] != "_"}
        told = {"fun": own.pop("fun")} | vars(self._settings) | own
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in told.items())})"

    def _before_clipping(self, gradient: object) -> Any:
        """Return the transformed gradient of one example."""
        assert self.pre_clipping_transform is not None
        made = self.pre_clipping_transform(gradient)
        if made is None:
            raise TypeError(
                "pre_clipping_transform must return the tree that is to be clipped, got None. Return the gradient also "
                "if you have changed it in place."
            )
        return made

    def __post_init__(self) -> None:
        for name in ("fun", "pre_clipping_transform")[: 1 if self.pre_clipping_transform is None else 2]:
            check_function(name, getattr(self, name))
        for name in ("has_aux", "keep_batch_dim", "return_values", "return_norms"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        key, batch = self.prng_argnum, self.batch_argnums
        if key is not None and (not isinstance(key, int) or isinstance(key, bool) or key < 0 or key in batch):
            raise ValueError(f"prng_argnum={key!r} must be >= 0 and not in batch_argnums={batch}. Pass one key.")
        divisor = as_divisor("normalize_by", self.normalize_by, self._settings.sum_format)
        object.__setattr__(self, "normalize_by", divisor)
        size = as_microbatch_size(self.microbatch_size, sized=self.argnums is not None)
        object.__setattr__(self, "microbatch_size", size)
        if self.pad_to is not None:
            object.__setattr__(self, "pad_to", as_number_of_examples("pad_to", self.pad_to))
        if self._settings.grid is not None and divisor != 1:
            raise ValueError("sums on a grid stay integers. Leave out normalize_by, and divide the result.")
        if self.unit not in ("example", "group"):
            raise ValueError(f"unit must be 'example' or 'group', got {shown(self.unit)}.")
        check_name("method", self.method, METHODS)
        if self.method == "ghost" and self._why_made():
            raise ValueError(f"method='ghost' is not possible here: {self._why_made()}. Pass method='auto'.")
        others = others_than(needed_positions(self.fun), self.argnums, key) if self._assumed else ()
        if len(others) > 1:
            raise TypeError(not_said(self._named(), others))

    @property
    def max_norm(self) -> Thresholds:
        """The threshold of each example, as you passed it."""
        return self._settings.max_norm

    @with_subnormals
    def sensitivity(
        self,
        relation: Relation = "add_or_remove_one",
        *,
        batch_size: int | None = None,
        layout: SumLayout | None = None,
    ) -> Sensitivity:
        """Return how far one unit can move the result. Scale the noise of private training to it.

        Args:
            relation: "add_or_remove_one", "replace_one" or "zero_out", as in `gradclip.Sensitivity`.
            batch_size: the largest number of examples in the whole sum, padding included. The rounding depends on it.
                If left out: `pad_to` times the layout's partial sums.
            layout: how results of this function are added up, if you add up several of them: with `psum` over devices,
                with an all-reduce over processes, or over virtual batches. The sensitivity is for their sum. What the
                layout leaves open, the function knows: its microbatches, and the most elements in any call so far, or
                2**26 before the first call; a call with more than that then warns. If gradients grow after the first
                call, call `sensitivity` again.

        With a grid, results are integers, and the bound is for these times max_norm / grid: multiply them after
        `gradclip.add_noise`, but before you add noise of your own.

        What is proven: given each example's gradient, the clipped sum moves by no more than this. What is assumed: an
        example's gradient does not depend on the other examples. But its last bits depend on the batch's shape and on
        its place, and a kink of the loss makes much of them. So the bound for "add_or_remove_one" is infinite, and
        `noise_std` raises a ValueError, unless you pass `pad_to`, `microbatch_size` or `method="loop"`. With
        `microbatch_size=1` or `method="loop"` it holds wherever the examples are. Otherwise, and with `prng_argnum` or
        PyTorch's random numbers, every example must keep its place: mask the places that are empty. The `note` of the
        result says for which batches the bound holds, or why it is infinite.

        Raises:
            ValueError: an unknown name, a count below 1, a sum that may overflow. TypeError: a layout that is no
            `gradclip.SumLayout`.
        """
        asked = as_layout(layout)
        if batch_size is None and self.pad_to is not None:
            batch_size = self.pad_to * asked.partial_sums
        count = None if batch_size is None else as_count("batch_size", batch_size)
        microbatches = self._observed.microbatches(self.microbatch_size, count)
        promise = sensitivity_of(
            self._settings,
            relation,
            unit=self.unit,
            normalize_by=self.normalize_by,
            batch_size=count,
            sum_format=self._settings.sum_format,
            layout=self._observed.layout(asked, microbatches, self._added_in()),
            factors=None if self._why_made() else self._observed.factors(self._most_at_once()),
        )
        if promise.note:
            return promise
        setting, keyed = (self.method, self.microbatch_size, self.pad_to), self.prng_argnum is not None
        return promise_for(promise, *setting, keyed=keyed, named=self._named())

    def _named(self) -> str:
        return "clipped_fun" if self.argnums is None else "clipped_grad"

    def _why_made(self) -> str:
        """Return which setting needs the gradient of each example; an empty string if none does."""
        settings = self._settings
        found = {
            "clipped_fun clips results, not gradients": self.argnums is None,
            f"method={self.method!r}": self.method in ("materialize", "loop"),
            "pre_clipping_transform= changes the gradient of each example": self.pre_clipping_transform is not None,
            "grid= rounds the gradient of each example": settings.grid is not None,
            "nonfinite='zero' changes elements of gradients": settings.policy.zeroes,
        }
        return next((why for why, holds in found.items() if holds), "")

    def _most_at_once(self) -> int | None:
        """Return the most examples that are in memory at a time, None for all of a batch."""
        if isinstance(self.microbatch_size, Memory):
            return MOST if self.pad_to is None else whole_program(self.pad_to)
        return self.microbatch_size

    def _added_in(self) -> SumDtype | None:
        """Return the dtype to which results are rounded and in which they are added up; None for the sum's own."""
        return None


def made_of(kind: type[F], asked: Mapping[str, Any]) -> F:
    """Return a function with the settings in `asked`, which are named as in `clipped_grad`. Other names are left out.

    Without `argnums` it clips results. Without `batch_argnums` the batch is the first argument after the parameters.
    """
    own, of_examples = (
        {f.name: asked[f.name] for f in fields(of) if f.name in asked} for of in (kind, PerExampleSettings)
    )
    settings, argnums, batch = PerExampleSettings(**of_examples), asked.get("argnums"), asked["batch_argnums"]
    places = positions("batch_argnums", int(argnums is not None) if batch is None else batch)
    own |= {"argnums": argnums, "batch_argnums": places, "_assumed": batch is None}
    return kind(_settings=settings, **own)

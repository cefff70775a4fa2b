"""`ClippedFunction`, which `clipped_grad` and `clipped_fun` return: it clips, sums and computes its sensitivity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gradclip.arguments import check_flag, check_mask
from gradclip.backends.entries import Entry
from gradclip.backends.registry import differentiating
from gradclip.core.values import Array
from gradclip.flush_mode import with_subnormals
from gradclip.leaves import counted
from gradclip.per_example.batch_shapes import promise_for, whole_program
from gradclip.per_example.batching.choose import batching_of
from gradclip.per_example.batching.verbs import Axes, Batching, Function, Programs, Step, mapped
from gradclip.per_example.call_arguments import (
    batch_size,
    check_assumption,
    check_positions,
    closed,
    framework_to_differentiate,
    has_mappings,
    needed_positions,
    not_said,
    opened,
    others_than,
)
from gradclip.per_example.clip import clip_examples
from gradclip.per_example.microbatches import Memory, as_microbatch_size, examples_in
from gradclip.per_example.observed import ObservedGradients
from gradclip.per_example.outputs import ExampleOutputs, value_and_aux
from gradclip.per_example.quantities import as_count, as_divisor, as_number_of_examples, check_function
from gradclip.per_example.sensitivity import Sensitivity, sensitivity_of
from gradclip.per_example.settings import PerExampleSettings
from gradclip.tree import flatten
from gradclip.typing import Mask, Method, Relation, SumDtype, Thresholds, Unit, WideDtype

_clip_examples = with_subnormals(clip_examples)


@dataclass(frozen=True, eq=False)
class ClippedFunction:
    """A function of a batch that clips each example's gradient (or result) by its own norm and returns the sum.

    Call it like `fun`, with a batch in the arguments at `batch_argnums`. `gradclip.clipped_grad` and
    `gradclip.clipped_fun` make it, and document the fields and the errors. With `argnums=None` it clips the results of
    `fun` instead of gradients.
    """

    # Integrations override _framework, _is_mapped, _over_batch, _to_clip, _finished and _added_in.

    fun: Function
    settings: PerExampleSettings
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
    method: Method = "vmap"
    assumed: bool = False  # batch_argnums was left out
    observed: ObservedGradients = field(default_factory=ObservedGradients, init=False, repr=False)
    programs: Programs = field(default_factory=Programs, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("fun", "pre_clipping_transform")[: 1 if self.pre_clipping_transform is None else 2]:
            check_function(name, getattr(self, name))
        for name in ("has_aux", "keep_batch_dim", "return_values", "return_norms"):
            object.__setattr__(self, name, check_flag(name, getattr(self, name)))
        key, batch = self.prng_argnum, self.batch_argnums
        if key is not None and (not isinstance(key, int) or isinstance(key, bool) or key < 0 or key in batch):
            raise ValueError(f"prng_argnum={key!r} must be >= 0 and not in batch_argnums={batch}. Pass one key.")
        divisor = as_divisor("normalize_by", self.normalize_by, self.settings.sum_format)
        object.__setattr__(self, "normalize_by", divisor)
        size = as_microbatch_size(self.microbatch_size, sized=self.argnums is not None)
        object.__setattr__(self, "microbatch_size", size)
        if self.pad_to is not None:
            object.__setattr__(self, "pad_to", as_number_of_examples("pad_to", self.pad_to))
        if self.settings.grid is not None and divisor != 1:
            raise ValueError("sums on a grid stay integers. Leave out normalize_by, and divide the result.")
        if self.unit not in ("example", "group"):
            raise ValueError(f"unit must be 'example' or 'group', got {self.unit!r}.")
        if self.method not in ("vmap", "loop"):
            raise ValueError(f"method must be 'vmap' or 'loop', got {self.method!r}.")
        others = others_than(needed_positions(self.fun), self.argnums, key) if self.assumed else ()
        if len(others) > 1:
            raise TypeError(not_said(self._named(), others))

    @property
    def max_norm(self) -> Thresholds:
        """The threshold of each example, as you passed it."""
        return self.settings.max_norm

    @with_subnormals
    def sensitivity(
        self,
        relation: Relation = "add_or_remove_one",
        *,
        batch_size: int | None = None,
        partial_sums: int = 1,
        partial_sums_in: SumDtype | None = None,
        summed_in: WideDtype = "float64",
        elements: object = None,
    ) -> Sensitivity:
        """Return how far one unit can move the result. Scale the noise of private training to it.

        Args:
            relation: "add_or_remove_one", "replace_one" or "zero_out", as in `gradclip.Sensitivity`.
            batch_size: the largest number of examples in the whole sum, padding included. The rounding depends on it.
                If left out: `pad_to` times `partial_sums`.
            partial_sums: how many results of this function you add up afterwards: with `psum` over devices, with an
                all-reduce over processes, or over virtual batches. The sensitivity is for their sum.
            partial_sums_in: the dtype in which you add them up, if it differs from the dtype of the results.
            summed_in: the dtype in which the device adds up examples: "float64", or "float32" if it has no float64.
            elements: the number of elements in one example's gradient, or the parameters, to count them. None: the
                most in any call so far, or 2**26 before the first call; a call with more than that then warns. If
                gradients grow after the first call, call `sensitivity` again.

        With a grid, results are integers, and the sensitivity is for these times max_norm / grid: multiply them before
        you add noise.

        What is proven: given each example's gradient, the clipped sum moves by no more than this. What is assumed: an
        example's gradient does not depend on the other examples. But its last bits depend on the batch's shape and on
        its place, and a kink of the loss makes much of them. So the bound for "add_or_remove_one" is infinite, and
        `noise_std` raises a ValueError, unless you pass `pad_to`, `microbatch_size` or `method="loop"`. With
        `microbatch_size=1` or `method="loop"` it holds wherever the examples are. Otherwise, and with `prng_argnum` or
        PyTorch's random numbers, every example must keep its place: mask the places that are empty. The `note` of the
        result says for which batches the bound holds, or why it is infinite.

        Raises:
            ValueError: an unknown name, a count below 1, a sum that may overflow. TypeError: `elements` that is neither
            a number nor a tree of arrays.

        """
        if batch_size is None and self.pad_to is not None:
            batch_size = self.pad_to * as_count("partial_sums", partial_sums)
        count = None if batch_size is None else as_count("batch_size", batch_size)
        promise = sensitivity_of(
            self.settings,
            relation,
            unit=self.unit,
            normalize_by=self.normalize_by,
            batch_size=count,
            sum_format=self.settings.sum_format,
            summed_in=summed_in,
            partial_sums=partial_sums,
            elements=self.observed.elements(elements),
            microbatches=self.observed.microbatches(self.microbatch_size, count),
            partial_sums_in=self._added_in() if partial_sums_in is None else partial_sums_in,
        )
        if promise.note:
            return promise
        setting, keyed = (self.method, self.microbatch_size, self.pad_to), self.prng_argnum is not None
        return promise_for(promise, *setting, keyed=keyed, named=self._named())

    def _named(self) -> str:
        return "clipped_fun" if self.argnums is None else "clipped_grad"

    def __call__(self, *args: Any, mask: Mask = None, **kwargs: Any) -> Any:
        """Return the sum, and the `ExampleOutputs` if you asked for any.

        `mask`: booleans of shape (batch,). An example with False contributes exactly zero, and its outputs are zeros.
        Trailing microbatches without a True are skipped. All other keyword arguments are passed to `fun`.
        """
        check_positions(args, self.argnums, self.batch_argnums, self.prng_argnum)
        mask = check_mask(mask)
        args = (*args, kwargs)
        axes = [0 if self._is_mapped(i, len(args)) else None for i in range(len(args))]
        kinds = {i: arg for i, arg in enumerate(args) if axes[i] == 0 and has_mappings(arg)}
        args = tuple(opened(arg) if i in kinds else arg for i, arg in enumerate(args))
        if self.assumed:
            check_assumption(self._named(), args[:-1], kwargs, self.argnums, self.batch_argnums, self.prng_argnum)
        verbs = batching_of(self._framework(args[:-1]), self.method)
        count = batch_size([None if axis is None else arg for arg, axis in zip(args, axes, strict=True)], mask)
        if self.pad_to is not None and count > self.pad_to:
            raise ValueError(f"the batch has {count} {self.unit}s, more than pad_to={self.pad_to}. Raise pad_to.")
        if self.prng_argnum is not None:
            keys = verbs.keys(args[self.prng_argnum], count)
            args = tuple(keys if i == self.prng_argnum else arg for i, arg in enumerate(args))
            axes[self.prng_argnum] = 0
        flags = None if mask is None else verbs.flags(mask)
        of_example = self._of_example(verbs, kinds)
        of_batch = self._over_batch(verbs, of_example, axes)
        dtypes: list[Any] = []
        step = self._step(verbs, of_batch, dtypes)
        given, rows, size = args, count, self._microbatch_size(args)
        if size is None and self.pad_to is not None:
            rows = whole_program(self.pad_to)
            given, flags = verbs.padded(args, axes, flags, count, rows)

        def run(mask: Array | None, *args: Any) -> Any:
            if size is None:
                return verbs.at_once(step, args, axes, mask, rows), dtypes
            return verbs.in_microbatches(step, args, axes, mask, count, size), dtypes

        if size is None and not verbs.keeps_whole_batches:
            (summed, outputs), known = run(flags, *given)
        else:
            setting, carriers = (self.max_norm, kinds, tuple(axes), rows, size), (0, *axes)
            (summed, outputs), known = verbs.kept(self.programs, setting, run, carriers, (flags, *given))
        if self.argnums is not None and count:
            self.observed.check_used(lambda: verbs.unused(of_example, args, axes, summed), verbs.modules_called)
        result = self._finished(summed, known)
        outputs = mapped(lambda x: x if x.shape[0] == count else x[:count], outputs)
        return (result, outputs) if self.has_aux or self.return_values or self.return_norms else result

    def _microbatch_size(self, args: Sequence[Any]) -> int | None:
        """Return the number of examples in memory at a time, None for the whole batch."""
        if not isinstance(self.microbatch_size, Memory):
            return self.microbatch_size
        positions = self.argnums if isinstance(self.argnums, tuple) else (self.argnums or 0,)
        return self.observed.noted_size(examples_in(self.microbatch_size, [args[i] for i in positions], self.pad_to))

    def _is_mapped(self, position: int, count: int) -> bool:
        """Say whether the argument at a position carries the batch. The last of `count` is the dict of keywords."""
        return position in self.batch_argnums

    def _over_batch(self, verbs: Batching, of_example: Function, axes: Axes) -> Function:
        """Map the function of one example over axis 0 of the arguments whose entry in `axes` is 0."""
        return verbs.over_batch(of_example, axes, None)

    def _of_example(self, verbs: Batching, kinds: Mapping[int, Any]) -> Function:
        """Return a function of one example: `(tree to clip, (value, aux))`. `kinds` holds opened arguments."""

        def fun(*args: Any) -> Any:
            given = list(args)
            for i in self.batch_argnums if self.keep_batch_dim else ():
                given[i] = mapped(lambda x: x[None], given[i])
            for i, kind in kinds.items():
                given[i] = closed(kind, given[i])
            *given, kwargs = given
            result = self.fun(*given, **kwargs)
            return value_and_aux(result, has_aux=self.has_aux, keep_batch_dim=self.keep_batch_dim)

        if self.argnums is None:
            return lambda *args: ((made := fun(*args))[0], ((), made[1]))
        return verbs.with_gradient(fun, self.argnums, self.pre_clipping_transform)

    def _step(self, verbs: Batching, of_batch: Function, dtypes: list[Any]) -> Step:
        """Return the function that processes one microbatch. It writes the dtypes of the clipped leaves to `dtypes`."""

        def step(args: Sequence[Any], mask: Array | None) -> tuple[Any, ExampleOutputs]:
            tree, (values, aux) = of_batch(*args)
            leaves = flatten(tree).leaves
            dtypes[:] = [leaf.dtype for leaf in leaves]
            summed, info = _clip_examples(self._to_clip(tree), self.settings, mask)
            self.observed.note(leaves)
            kept = (values if self.return_values else None, aux if self.has_aux else None)
            values, aux = kept if mask is None else verbs.blanked(kept, mask)
            return summed, ExampleOutputs(values, info.norms if self.return_norms else None, aux)

        return step

    def _to_clip(self, tree: object) -> Any:
        return tree

    def _finished(self, summed: object, dtypes: Sequence[Any]) -> Any:
        """Turn the sum into the result of a call. `dtypes` are the dtypes of the clipped leaves."""
        flat = counted(summed) if self.normalize_by != 1.0 else None
        return summed if flat is None else flat.rebuild([x / self.normalize_by for x in flat.leaves])

    def _added_in(self) -> Any:
        """Return the dtype to which results are rounded and in which they are added up; None for the sum's own."""
        return None

    def _framework(self, args: Sequence[Any]) -> Entry:
        """Return the framework of the first differentiated argument, or else the first among all arguments."""
        if self.argnums is None:
            return differentiating(leaf for arg in args for leaf in flatten(arg).leaves)
        return framework_to_differentiate(args, self.argnums, self.batch_argnums)

"""`ClippedFunction`, which `clipped_grad` and `clipped_fun` return: it clips, sums and computes its sensitivity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from typing import Any

from gradclip._src.annotations import Mask
from gradclip._src.backends.entries import Entry
from gradclip._src.backends.registry import differentiating
from gradclip._src.core.values import Array
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.passed.arguments import check_mask
from gradclip._src.passed.leaves import counted
from gradclip._src.private.batching.calls import Clipped, ExampleOutputs, PreparedCall, check_loss, value_and_aux
from gradclip._src.private.batching.choose import batching_of, check_hooks, laid_out
from gradclip._src.private.batching.verbs import Axes, Batching, Function, Programs, Step, mapped
from gradclip._src.private.functions.settings import FunctionSettings, ObservedGradients
from gradclip._src.private.ghost.plan import Plan, made_everywhere
from gradclip._src.private.ghost.step import Clip, in_factors, parameters_of, planned_for, why_none
from gradclip._src.private.sums.call_arguments import (
    batch_size,
    check_assumption,
    check_batches_of,
    check_positions,
    closed,
    framework_to_differentiate,
    has_mappings,
    opened,
)
from gradclip._src.private.sums.clip import clip_examples
from gradclip._src.private.sums.microbatches import Memory, examples_in, whole_program
from gradclip._src.private.sums.settings import PerExampleSettings
from gradclip._src.public import public
from gradclip._src.tree import flatten

_clip_examples = with_subnormals(clip_examples)


@public
@dataclass(frozen=True, eq=False, repr=False)
class ClippedFunction(FunctionSettings):
    """A function of a batch that clips each example's gradient (or result) by its own norm and returns the sum.

    Call it like `fun`, with a batch in the arguments at `batch_argnums`. `gradclip.clipped_grad` and
    `gradclip.clipped_fun` make it, and document the fields and the errors. With `argnums=None` it clips the results of
    `fun` instead of gradients.
    """

    # Integrations override _framework, _is_mapped, _over_batch, _to_clip, _finished and _added_in.

    _programs: Any = field(default_factory=Programs, init=False, repr=False)
    _plans: Any = field(default_factory=Programs, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # Plain values: a saved function names no class that users do not know. Compiled programs cannot be saved.
        kept = {name: value for name, value in vars(self).items() if not isinstance(value, Programs)}
        plain = {name: dict(vars(kept[name])) for name in ("_settings", "_observed")}
        size = self.microbatch_size
        return kept | plain | {"microbatch_size": vars(size) if isinstance(size, Memory) else size}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        settings, observed = PerExampleSettings(**state["_settings"]), ObservedGradients()
        vars(observed).update(state["_observed"])
        size = state["microbatch_size"]
        size = Memory(**size) if isinstance(size, dict) else size
        vars(self).update(state, _settings=settings, _observed=observed, microbatch_size=size)
        vars(self).update(_programs=Programs(), _plans=Programs())

    def __call__(self, *args: Any, mask: Mask = None, **kwargs: Any) -> Any:
        """Return the sum, and the `ExampleOutputs` if you asked for any.

        `mask`: booleans of shape (batch,). An example with False contributes exactly zero, and its outputs are zeros.
        Trailing microbatches without a True are skipped. All other keyword arguments are passed to `fun`.
        """
        call = self._prepared(args, mask, kwargs)
        result, outputs = laid_out(
            call.framework,
            (call.flags, call.args),
            lambda given: self._results(call._replace(flags=given[0], args=given[1])),
        )
        return (result, outputs) if self.has_aux or self.return_values or self.return_norms else result

    def _results(self, call: PreparedCall) -> tuple[Any, Any]:
        """Return the sum of the clipped results, and the outputs of each example."""
        verbs, axes, count = call.verbs, call.axes, call.examples
        given, flags, rows, size = call.args, call.flags, count, self._microbatch_size(call.args)
        if size is None and self.pad_to is not None:
            rows = whole_program(self.pad_to)
            given, flags = verbs.padded(given, axes, flags, count, rows)
        plan = self._planned(call, rows, size)
        self._observed.note_plan(ghost=plan.ghost, cancels=plan.cancels)
        dtypes: list[Any] = []
        measure = self._to_measure(call)
        step = self._step(call, plan, measure, dtypes)

        def run(mask: Array | None, *args: Any) -> Any:
            if size is None:
                return verbs.at_once(step, args, axes, mask, rows), dtypes
            return verbs.in_microbatches(step, args, axes, mask, count, size), dtypes

        keeps = verbs.keeps_whole_batches or (plan.in_factors and not self._settings.policy.raises)
        if size is None and not keeps:
            (summed, outputs), known = run(flags, *given)
        else:
            setting = (self.max_norm, call.kinds, tuple(axes), rows, size, plan.tapped, plan.program)
            (summed, outputs), known = verbs.kept(self._programs, setting, run, (0, *axes), (flags, *given))
        if self.argnums is not None and count:
            self._observed.check_used(lambda: verbs.unused(measure, call.args, axes, summed), verbs.modules_called)
        result = self._finished(summed, known)
        return result, mapped(lambda x: x if x.shape[0] == count else x[:count], outputs)

    def plan(self, *args: Any, mask: Mask = None, **kwargs: Any) -> Plan:
        """Return how a call with these arguments measures the gradient of each parameter, and why.

        The arguments are those of a call. In PyTorch `fun` runs once more, on the first example, as it does in a first
        call with arguments of new shapes. PyTorch's random numbers stay as they are. Print the plan for a table: for
        each parameter its uses in an example, how its gradients are measured, the bytes that gradients and that factors
        take for all examples in memory at a time, and the reason. Measured by

            "ghost": norms and the sum follow from the factors, and no gradient is made
            "product": gradients are made, by one product of the factors
            "autograd": the framework makes the gradients

        `plan.leaves` has the rows, with `path`, `shape`, `uses`, `how`, `why`, `bytes_made`, `bytes_kept` and `terms`.

        Raises as a call does.
        """
        call = self._prepared(args, mask, kwargs)
        size = self._microbatch_size(call.args)
        rows = call.examples if self.pad_to is None else whole_program(self.pad_to)
        found = laid_out(call.framework, call.args, lambda given: self._planned(call._replace(args=given), rows, size))
        if found.leaves:
            return found
        argnums = 0 if self.argnums is None else self.argnums
        why = self._why_made() or why_none(call, argnums) or "small"
        return made_everywhere(parameters_of(call.args, argnums), size or rows, why)

    def _prepared(self, args: Sequence[Any], mask: Mask, kwargs: Mapping[str, Any]) -> PreparedCall:
        """Check the arguments of a call, and return them as a function of one example takes them."""
        check_positions(args, self.argnums, self.batch_argnums, self.prng_argnum)
        mask = check_mask(mask)
        given = (*args, dict(kwargs))
        axes = [0 if self._is_mapped(i, len(given)) else None for i in range(len(given))]
        kinds = {i: arg for i, arg in enumerate(given) if axes[i] == 0 and has_mappings(arg)}
        given = tuple(opened(arg) if i in kinds else arg for i, arg in enumerate(given))
        if self._assumed:
            check_assumption(self._named(), given[:-1], kwargs, self.argnums, self.batch_argnums, self.prng_argnum)
        framework = self._framework(given[:-1])
        verbs = batching_of(framework, self.method)
        if self.argnums is not None:
            check_hooks(framework, parameters_of(given, self.argnums))
        count = batch_size([None if axis is None else arg for arg, axis in zip(given, axes, strict=True)], mask)
        if self.pad_to is not None and count > self.pad_to:
            raise ValueError(f"the batch has {count} {self.unit}s, more than pad_to={self.pad_to}. Raise pad_to.")
        if self.prng_argnum is not None:
            keys = verbs.keys(given[self.prng_argnum], count)
            given = tuple(keys if i == self.prng_argnum else arg for i, arg in enumerate(given))
            axes[self.prng_argnum] = 0
        return PreparedCall(framework, verbs, given, axes, kinds, count, None if mask is None else verbs.flags(mask))

    def _microbatch_size(self, args: Sequence[Any]) -> int | None:
        """Return the number of examples in memory at a time, None for the whole batch."""
        if not isinstance(self.microbatch_size, Memory):
            return self.microbatch_size
        positions = self.argnums if isinstance(self.argnums, tuple) else (self.argnums or 0,)
        return self._observed.noted_size(examples_in(self.microbatch_size, [args[i] for i in positions], self.pad_to))

    def _is_mapped(self, position: int, count: int) -> bool:
        """Say whether the argument at a position carries the batch. The last of `count` is the dict of keywords."""
        return position in self.batch_argnums

    def _over_batch(self, verbs: Batching, of_example: Function, axes: Axes) -> Function:
        """Map the function of one example over axis 0 of the arguments whose entry in `axes` is 0."""
        return verbs.over_batch(of_example, axes, None)

    def _of_example(self, call: PreparedCall) -> Function:
        """Return a function of one example: `(value, aux)`. It holds no arrays, because JAX keeps functions."""
        kinds = call.kinds

        def fun(*args: Any) -> Any:
            given = list(args)
            for i in self.batch_argnums if self.keep_batch_dim else ():
                given[i] = mapped(lambda x: x[None], given[i])
            for i, kind in kinds.items():
                given[i] = closed(kind, given[i])
            *given, kwargs = given
            result = self.fun(*given, **kwargs)
            value, aux = value_and_aux(result, has_aux=self.has_aux, keep_batch_dim=self.keep_batch_dim)
            if self.argnums is not None:
                check_loss(value)
            return value, aux

        return fun

    def _to_measure(self, call: PreparedCall) -> Function:
        """Return a function of one example: `(tree to clip, (value, aux))`."""
        fun = self._of_example(call)
        if self.argnums is None:
            return lambda *args: ((made := fun(*args))[0], ((), made[1]))
        transform = None if self.pre_clipping_transform is None else self._before_clipping
        return call.verbs.with_gradient(fun, self.argnums, transform)

    def _planned(self, call: PreparedCall, rows: int, size: int | None) -> Plan:
        """Return how the gradients of a batch, or of microbatches of a size, are measured."""
        examples = rows if size is None else size
        if self._why_made() or self.argnums is None:
            return Plan((), examples)
        fun, once = self._of_example(call), size is not None
        return planned_for(call, fun, self.argnums, examples, self.method, self._plans, traced_once=once)

    def _step(self, call: PreparedCall, plan: Plan, measure: Function, dtypes: list[Any]) -> Step:
        """Return the function that processes one microbatch. It writes the dtypes of the clipped leaves to `dtypes`."""
        of_batch = self._over_batch(call.verbs, measure, call.axes)

        def made(args: Sequence[Any], mask: Array | None) -> Clipped:
            tree, outputs = of_batch(*args)
            summed, info = _clip_examples(self._to_clip(tree), self._settings, mask)
            return Clipped(summed, info.norms, flatten(tree).leaves, outputs)

        clip: Clip = made
        if plan.in_factors:
            assert self.argnums is not None  # results are not clipped in factors
            note = self._observed.note_plan
            clip = in_factors(call, self._of_example(call), self.argnums, plan, self._settings, made, note)

        def step(args: Sequence[Any], mask: Array | None) -> tuple[Any, ExampleOutputs]:
            summed, norms, leaves, (values, aux) = clip(args, mask)
            dtypes[:] = [leaf.dtype for leaf in leaves]
            self._observed.note(leaves)
            kept = (values if self.return_values else None, aux if self.has_aux else None)
            values, aux = kept if mask is None else call.verbs.blanked(kept, mask)
            return summed, ExampleOutputs(values, norms if self.return_norms else None, aux)

        return step

    def _to_clip(self, tree: object) -> Any:
        return tree

    def _finished(self, summed: object, dtypes: Sequence[Any]) -> Any:
        """Turn the sum into the result of a call. `dtypes` are the dtypes of the clipped leaves."""
        flat = counted(summed) if self.normalize_by != 1.0 else None
        return summed if flat is None else flat.rebuild([x / self.normalize_by for x in flat.leaves])

    def _framework(self, args: Sequence[Any]) -> Entry:
        """Return the framework of the first differentiated argument, or else the first among all arguments."""
        if self.argnums is None:
            check_batches_of(None, args, self.batch_argnums)
            return differentiating(leaf for arg in args for leaf in flatten(arg).leaves)
        return framework_to_differentiate(args, self.argnums, self.batch_argnums)


# `gradclip.clipped_grad` and `clipped_fun` make it: users do not pass its fields.
ClippedFunction.__init__.__signature__ = Signature(  # type: ignore[attr-defined]
    [Parameter("self", Parameter.POSITIONAL_ONLY), Parameter("fields", Parameter.VAR_KEYWORD)]
)

"""`PrivateRun`: the noise of one training run, and the privacy that it has spent."""

from __future__ import annotations

import decimal
import math
import os
from collections.abc import Mapping
from threading import Lock
from typing import Any

import numpy as np

from gradclip._src.annotations import Tree
from gradclip._src.backends.registry import framework_of
from gradclip._src.flush_mode import with_subnormals
from gradclip._src.private.noise.add import add_noise, is_recorded
from gradclip._src.private.noise.discrete import EXACT
from gradclip._src.private.run.accounting import (
    Releases,
    checked_delta,
    checked_multiplier,
    enough_steps,
    epsilon_at,
    multiplier_on_integers,
    smallest_multiplier,
)
from gradclip._src.private.run.batches import PoissonBatches
from gradclip._src.private.run.state import check_same, loaded_parts, saved_batches, saved_parts, settings_of
from gradclip._src.private.sums.sensitivity import Sensitivity
from gradclip._src.private.sums.settings import as_count
from gradclip._src.public import public
from gradclip._src.tree import flatten
from gradclip._src.words import shown, typed, with_advice


def check_not_recorded(summed: object) -> None:
    """Raise a ValueError for a sum inside of compiled code."""
    if is_recorded([leaf for leaf in flatten(summed).leaves if framework_of(leaf) is not None]):
        raise ValueError(
            "a run counts what it releases, and compiled code would count once for all calls. Return the sum from the "
            "compiled function, and call add_noise of the run on it, outside of compiled code."
        )


def check_batches(batches: object) -> None:
    """Raise a TypeError for anything but batches that are sampled as the accountant assumes."""
    missing = [name for name in ("n", "rate", "steps", "pad_to", "overflow", "secure") if not hasattr(batches, name)]
    if missing:
        raise TypeError(
            f"batches must be gradclip.PoissonBatches, got {typed(batches)}. The "
            "accountant holds for batches that are sampled as it assumes, not for a shuffled data set."
        )


def check_generator(rng: object) -> None:
    """Raise a TypeError for what draws no noise, or the same noise at every step."""
    if not (isinstance(rng, str) and rng in EXACT) and not hasattr(rng, "normal") and not hasattr(rng, "manual_seed"):
        raise TypeError(
            "rng must be 'system', 'urandom', 'opendp', a numpy.random.Generator or a torch.Generator, got "
            f"{shown(rng)}. A JAX key would give every step the same noise: call gradclip.add_noise with a new key at "
            "each step, and dp-accounting for epsilon."
        )


def check_overflow(batches: PoissonBatches, delta: float) -> None:
    """Raise a ValueError for batches that overflow too often for delta."""
    if 2 * batches.overflow >= delta:
        raise ValueError(
            f"a batch does not fit into {batches.pad_to} places with a probability of up to {batches.overflow:.2g} in "
            f"{batches.steps} steps, and delta is {delta:g}. Pass a larger pad_to, or leave it out."
        )


def check_sensitivity(sensitivity: object, pad_to: int) -> None:
    """Raise an error for a sensitivity that does not fit Poisson batches of up to `pad_to` units."""
    if not isinstance(sensitivity, Sensitivity):
        raise TypeError(
            f"sensitivity must be a gradclip.Sensitivity, got {shown(sensitivity)}: a number does not say what it "
            "compares. Call .sensitivity() of a clipped function, or gradclip.clipped_sum_sensitivity."
        )
    if sensitivity.relation not in ("add_or_remove_one", "zero_out"):
        raise ValueError(
            f"the sensitivity is for {sensitivity.relation!r}, and Poisson batches are accounted for adding or "
            "removing one, or putting zeros in its place. Pass .sensitivity('add_or_remove_one'). Its epsilon, twice, "
            "holds for replacing one, at (1 + e**epsilon) times delta."
        )
    if not sensitivity.total > 0:
        raise ValueError("the sensitivity is 0: such sums need no noise. Check max_norm.")
    if sensitivity.batch_size is None or sensitivity.batch_size < pad_to:
        held = "does not say for which batches it holds"
        held = held if sensitivity.batch_size is None else f"holds for {sensitivity.batch_size} {sensitivity.unit}s"
        raise ValueError(
            f"the sensitivity {held}, and batches have up to {pad_to}. Pass pad_to=batches.pad_to to "
            "the clipped function, or batch_size=batches.pad_to to .sensitivity()."
        )


_STEPS_OF_FLOATS = 2**16
"""Float sums are rounded to steps of at most this part of the sensitivity, as `private/noise/add.py` says."""

_counting = Lock()  # of the module, so that runs can be copied


@public
class PrivateRun:
    """The noise of one training run: how much, what was released, and the epsilon of that at `delta`.

    Args:
        batches: the `gradclip.PoissonBatches` of the run. One sum is released for each batch.
        sensitivity: the `gradclip.Sensitivity` of the sums, for "add_or_remove_one" or "zero_out", with the batch size
            that it holds for: `clipped_grad(..., pad_to=batches.pad_to).sensitivity()`.
        delta: at which probability the bound may fail, from 1e-10, and below 1 / n.
        noise_multiplier: the standard deviation of the noise divided by the sensitivity.
        epsilon: instead of it, the largest epsilon after `batches.steps` releases, with those of earlier parts. The
            multiplier is then the smallest of 4 digits that keeps it.
        rng: what draws the noise, as in `gradclip.add_noise`: "system", "urandom" or "opendp", which are exact, or a
            generator that keeps a state: `numpy.random.Generator` or `torch.Generator`, whose noise is not proven to be
            private, and which repeats itself in a copy of the run.
        state: what an earlier part of the run released, from its `state_dict()`, if it goes on with other batches,
            noise or more steps. Epsilon counts it, and `epsilon=` plans with it. To go on as before, make the run as it
            was made, and call `load_state_dict`.
        save_every: the most sums that are released after a call of `state_dict`, or after the run is made; then the run
            asks for the next call. So after a crash it is known how many sums a saved state may lack.

    What epsilon holds for: whoever sees all released sums, and all that is computed from them, learns nearly the same
    with one example (or group) more or less, or with zeros in its place. Losses, counts and norms are not covered
    unless noise is added to them.
    What is added to dp-accounting's result is proven.

    Raises:
        ValueError: a number out of range, or a sensitivity that does not fit the batches: another relation, no batch
        size, or one below `pad_to`, no finite bound; noise below 64 steps of a grid; batches that overflow too often
        for `delta`; an `epsilon` that earlier parts have spent. TypeError: `batches` or `sensitivity` of another type,
        a JAX key as `rng`, or both or neither of `noise_multiplier` and `epsilon`. ModuleNotFoundError: dp-accounting
        is not installed.

    >>> from gradclip import PoissonBatches, clipped_sum_sensitivity
    >>> batches = PoissonBatches(n=1000, rate=1.0, steps=4)
    >>> sensitivity = clipped_sum_sensitivity(
    ...     1.0, batch_size=batches.pad_to, grid=2**20
    ... )
    >>> run = PrivateRun(batches, sensitivity, delta=1e-5, noise_multiplier=2.0)
    >>> round(run.epsilon(steps=4), 2)  # four times with 2.0 is once with 1.0
    4.38
    >>> run.epsilon()  # nothing is released yet
    0.0
    """

    releases: int

    @with_subnormals
    def __init__(
        self,
        batches: PoissonBatches,
        sensitivity: Sensitivity,
        *,
        delta: float,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        rng: object = "system",
        state: Mapping[str, Any] | None = None,
        save_every: int | None = None,
    ) -> None:
        if (noise_multiplier is None) == (epsilon is None):
            raise TypeError("pass noise_multiplier or epsilon, one of the two: the other follows.")
        check_batches(batches)
        check_generator(rng)
        self.batches, self.delta, self._rng = batches, checked_delta(delta), rng
        self._earlier = () if state is None else loaded_parts(state)
        self.save_every = None if save_every is None else as_count("save_every", save_every)
        self.__dict__ |= {"releases": 0, "_saved": 0, "_made": 0, "_made_here": False, "_process": os.getpid()}
        check_sensitivity(sensitivity, batches.pad_to)
        self.sensitivity = sensitivity
        if sensitivity.in_steps is not None and not self.exact:
            raise ValueError("sums on a grid get exact noise only. Pass rng='system', or leave out grid.")
        check_overflow(batches, self.delta)
        if epsilon is not None:
            self._check_not_spent(epsilon)
            noise_multiplier = smallest_multiplier(self._planned, epsilon)
        self.noise_multiplier = checked_multiplier(noise_multiplier)
        self._in_reals(self.noise_multiplier)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "releases":
            if as_count(name, value) < self.releases:
                raise ValueError(f"{self.releases} sums are released, and what is released stays so, got {value!r}.")
        elif name in self.__dict__:
            raise AttributeError(
                f"{name} of a run is fixed: the epsilon of its releases rests on it. Make another PrivateRun. The "
                "epsilons of both, added, hold at the sum of their deltas."
            )
        object.__setattr__(self, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_made": 0, "_process": os.getpid()}
        if not getattr(self.batches, "drawn", 1):  # a copy of them, which has drawn none
            of_generator = isinstance(self.batches.seed, np.random.Generator)  # it was copied where it stands
            self.batches._begin_at(self.releases, 0 if of_generator else self.releases)

    @with_advice
    def state_dict(self) -> dict[str, Any]:
        """Return what was released, in plain numbers: dicts, lists, floats, ints and strings.

        Save it with the model, after the step that used the last sum. `torch.load(weights_only=True)` and JSON load it.
        """
        self.__dict__["_saved"] = self.releases
        return self._settings | {
            "parts": saved_parts(self._parts(self.releases)),
            "releases": self.releases,
            "save_every": self.save_every,
            "batches": saved_batches(self.batches),
        }

    @with_advice
    def load_state_dict(self, state: Mapping[str, Any], *, lost: int | None = None) -> None:
        """Count what was released before, and let the batches go on after it.

        Make the run as it was made, load, and iterate its batches: those that are left.

        Args:
            state: what `state_dict()` returned.
            lost: how many sums may have been released after the state was saved, and before a crash. They are counted
                as released, and their batches are left out, so the run ends as many steps earlier. None: `save_every`,
                which bounds it. Pass 0 if the state was saved after the last sum.

        Raises:
            ValueError: a run that was made otherwise, or that has released sums itself; noise of a generator, which
            would be the same again. TypeError: a `state` of another type, or `lost` left out without `save_every`.
        """
        parts = loaded_parts(state)
        self._check_same(state, parts)
        missing = self._lost(state, lost)
        count = min(as_whole("releases", state.get("releases")) + missing, self.batches.steps)
        skipped = missing if isinstance(self.batches.seed, np.random.Generator) else count
        self.batches._begin_at(count, skipped, state["batches"].get("generator"))
        self.__dict__ |= {"releases": count, "_saved": count}

    @property
    def exact(self) -> bool:
        """Whether noise is drawn exactly, from the system's random numbers or a key that it draws."""
        return isinstance(self._rng, str)

    @with_advice
    def add_noise(self, summed: Tree, *, sensitivity: Sensitivity | None = None) -> Tree:
        """Return a sum with noise, by `gradclip.add_noise`, and count it as released.

        Call it once for each batch: two releases of one batch cost more than two of different batches. More releases
        than `batches.drawn` are refused, if batches are drawn in this process at all, and more than `batches.steps` in
        any case.

        Args:
            summed: the clipped sum of one batch, with arrays that hold values: not inside `jax.jit`.
            sensitivity: that of this sum, if the threshold is not that of the other steps. The noise multiplier is
                the same.

        Raises what `gradclip.add_noise` does, and ValueError for a sensitivity that does not fit the batches, inside
        compiled code, when all batches of the run are released, when `save_every` asks for `state_dict()`, and in a
        forked process, whose releases this one would not count.
        """
        promised = self.sensitivity if sensitivity is None else self._checked(sensitivity)
        check_not_recorded(summed)
        self._check_process()
        self._check_goes_on()
        self._check_repeats()
        noised = add_noise(summed, promised, noise_multiplier=self.noise_multiplier, rng=self._rng)
        with _counting:
            self._check_goes_on()  # another thread may have released the last sum meanwhile
            self.__dict__["releases"] += 1
            self.__dict__["_made_here"] = True
            self.__dict__["_made"] += getattr(self.batches, "drawn", 0) > 0
        return noised

    @with_subnormals
    def epsilon(self, steps: int | None = None) -> float:
        """Return epsilon at `delta` of the sums released so far, or of `steps` releases of this run.

        Both with those of earlier parts.
        """
        count = self.releases if steps is None else as_count("steps", steps)
        parts = self._parts(count)
        return epsilon_at(parts, self.delta) if parts else 0.0

    def __repr__(self) -> str:
        made = f"{self.releases} of {self.batches.steps} sums released"
        return f"PrivateRun(noise_multiplier={self.noise_multiplier:g}, delta={self.delta!r}, {made})"

    def __str__(self) -> str:
        unit, batches = self.sensitivity.unit, self.batches
        before = sum(part.steps for part in self._earlier)
        made = f"{self.releases} of {batches.steps} sums released{f', after {before} of earlier parts' * bool(before)}"
        lines = [
            f"epsilon {_at_most(self.epsilon(), 4)} at delta {self.delta!r}, {self._change()} one {unit}: {made}",
            f"{batches.n} {unit}s, rate {batches.rate:g}, at most {batches.pad_to} in a batch "
            f"(more would be drawn with a probability of at most {_at_most(batches.overflow, 2)})",
            f"noise multiplier {self.noise_multiplier:g}, sensitivity {self.sensitivity.total:g}",
            *(f"not proven: {what}" for what in self._not_proven()),
        ]
        return "\n".join(lines)

    def _not_proven(self) -> list[str]:
        """Return what the guarantee rests on that is not proven."""
        unit, found = self.sensitivity.unit, []
        if not self.exact:
            found.append("the noise is that of a generator of floating-point numbers. Pass rng='system'")
        if not self.batches.secure:
            found.append("the batches follow from a seed. Whoever knows it knows who was in which batch")
        if self.delta * self.batches.n >= 1:
            found.append(f"that no {unit} is revealed whole: delta is not below 1 / n")
        return [*found, f"a gradient depends on its own {unit} only, and dp-accounting computes what it says"]

    def _checked(self, sensitivity: Sensitivity) -> Sensitivity:
        """Check the sensitivity of one release against that of the run."""
        check_sensitivity(sensitivity, self.batches.pad_to)
        if sensitivity.unit != self.sensitivity.unit:
            raise ValueError(
                f"the run protects one {self.sensitivity.unit}, and this sum moves by one {sensitivity.unit}."
            )
        if sensitivity.relation != self.sensitivity.relation:
            raise ValueError(
                f"this sensitivity is for {sensitivity.relation!r}, and that of the run for "
                f"{self.sensitivity.relation!r}. Pass .sensitivity({self.sensitivity.relation!r})."
            )
        if (sensitivity.in_steps or _STEPS_OF_FLOATS) < self._steps():
            raise ValueError(
                "this sensitivity has fewer steps than that of the run. Make the PrivateRun with the coarsest grid."
            )
        return sensitivity

    def _change(self) -> str:
        return self.sensitivity.relation.removesuffix("_one").replace("_", " ")

    def _check_process(self) -> None:
        """Raise a ValueError in a forked process: neither counts what the other releases."""
        if os.getpid() != self.__dict__["_process"]:
            raise ValueError(
                "this run was made in another process, which does not count what is released here. A generator would "
                "draw the same noise in both. Make one PrivateRun, in the process that adds the noise."
            )

    def _check_goes_on(self) -> None:
        """Raise a ValueError at the end of the run, and where its state must be saved first."""
        if self.releases >= self.batches.steps:
            raise ValueError(
                f"all {self.batches.steps} sums of this run are released. To release more, make PoissonBatches with "
                "as many more steps, and pass them to PrivateRun(..., state=run.state_dict()), which counts these."
            )
        if self.save_every is not None and self.releases - self.__dict__["_saved"] >= self.save_every:
            raise ValueError(
                f"{self.save_every} sums were released since state_dict() was called, and save_every={self.save_every} "
                "promises that a saved state lacks no more. Save run.state_dict() with the model, then go on."
            )

    @property
    def _settings(self) -> dict[str, Any]:
        """What a run is made with that its sums rest on, beside its batches."""
        return {
            "noise_multiplier": self.noise_multiplier,
            "unit": self.sensitivity.unit,
            "relation": self.sensitivity.relation,
        }

    def _check_not_spent(self, epsilon: float) -> None:
        spent = epsilon_at(self._earlier, self.delta) if self._earlier else -math.inf
        if spent >= epsilon:
            raise ValueError(
                f"earlier parts of the run have spent epsilon {_at_most(spent, 4)} at delta {self.delta!r}, and "
                f"epsilon={epsilon!r} is no more. Pass a larger epsilon."
            )

    def _check_same(self, state: Mapping[str, Any], parts: tuple[Releases, ...]) -> None:
        """Raise a ValueError if the state is not that of a run that was made as this one, or if sums would be lost."""
        if self.__dict__["_made_here"]:
            raise ValueError(
                f"this run has released {self.releases} sums itself, which loading would forget. Load into a new run."
            )
        if not self.exact:
            raise ValueError(
                "a generator that is made again draws the noise of the steps before again. Pass rng='system'."
            )
        check_same(state.get("batches"), settings_of(self.batches))
        check_same(state, self._settings)
        if parts != self._parts(as_whole("releases", state.get("releases"))):
            raise ValueError(
                "the state has other earlier parts or another grid than this run. Make the run as it was made, with "
                "the same state= and sensitivity."
            )

    def _lost(self, state: Mapping[str, Any], lost: int | None) -> int:
        """Return how many sums a saved state may lack."""
        if lost is None:
            lost = state.get("save_every")
        if lost is None:
            raise TypeError(
                "say how many sums were released after the state was saved: lost=0 if none, or after a crash at most "
                "the steps between two saved states. A PrivateRun(..., save_every=...) bounds it itself."
            )
        return as_whole("lost", lost)

    def _parts(self, count: int) -> tuple[Releases, ...]:
        """Return what is released once this run has released so many sums."""
        return (*self._earlier, self._part(count, self.noise_multiplier)) if count else self._earlier

    def _part(self, count: int, multiplier: float) -> Releases:
        rounds, overflow = math.ceil(count / self.batches.steps), self.batches.overflow
        overflow = min(1.0, math.nextafter(rounds * overflow, math.inf) if overflow else 0.0)
        return Releases(self.batches.rate, count, self._in_reals(multiplier), overflow)

    def _check_repeats(self) -> None:
        """Raise a ValueError if a batch is released again, as far as that can be seen."""
        drawn, made = getattr(self.batches, "drawn", 0), self.__dict__["_made"]
        if 0 < drawn <= made and self.batches.rate < 1:
            raise ValueError(
                f"{made} sums were released since batches are drawn, and {drawn} were: this would be a second sum of "
                "one batch, which the accountant does not assume. Clip and release all of a batch as one tree, and "
                "iterate the batches that the run was made with."
            )

    def _in_reals(self, multiplier: float) -> float:
        """Return the multiplier of noise in the reals that is no more private than the noise of this run."""
        return multiplier_on_integers(multiplier, self._steps()) if self.exact else multiplier

    def _planned(self, multiplier: float, width: float) -> float:
        """Return epsilon of the whole run, and infinity where noise has too few steps for a proof."""
        if self.exact and not enough_steps(multiplier, self._steps()):
            return math.inf
        return epsilon_at((*self._earlier, self._part(self.batches.steps, multiplier)), self.delta, width)

    def _steps(self) -> float:
        return self.sensitivity.in_steps or _STEPS_OF_FLOATS


def _at_most(value: float, digits: int) -> str:
    """Return a number of so many digits, rounded up."""
    rounded = decimal.Context(prec=digits, rounding=decimal.ROUND_CEILING).plus(decimal.Decimal(value))
    return f"{float(rounded):.{digits}g}"


def as_whole(name: str, value: object) -> int:
    """Return a count that may be 0."""
    return 0 if value == 0 and not isinstance(value, bool) else as_count(name, value)

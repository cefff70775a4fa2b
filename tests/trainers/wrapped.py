"""Strategies of Flower that clip, and federations in this process that they train."""

import numpy as np
import pytest
from flwr.clientapp import mod
from flwr.serverapp import strategy as theirs
from flwr.supercore.privacy_accounting import NeighboringRelation, PrivacyConfig, PrivacySpent, SamplingMethod

from federation import InProcess, arrays_of, record
from gradclip.integrations import flower

SERVER, CLIENT = "DifferentialPrivacyServerSide", "DifferentialPrivacyClientSide"
FIXED = [f"{side}FixedClipping" for side in (SERVER, CLIENT)]
ADAPTIVE = [f"{side}AdaptiveClipping" for side in (SERVER, CLIENT)]
OURS = {CLIENT: {"Fixed": flower.fixedclipping_mod, "Adaptive": flower.adaptiveclipping_mod}, SERVER: {}}
THEIRS = {CLIENT: {"Fixed": mod.fixedclipping_mod, "Adaptive": mod.adaptiveclipping_mod}, SERVER: {}}
every_wrapper = pytest.mark.parametrize("name", FIXED + ADAPTIVE)
OLD = {"w": np.array([1.0, -2.0], np.float32), "b": np.array(0.5, np.float32), "n": np.array(10)}


def average(**settings):
    return theirs.FedAvg(**({"fraction_evaluate": 0.0} | settings))


def wrapper(name, library=flower, *, clients=4, noise=0.0, threshold=1.0, inner=None, **settings):
    first = (threshold, clients) if "Fixed" in name else (clients, threshold)
    return getattr(library, name)(inner or average(), noise, *first, **settings)


def mods(name, table=OURS):
    side = SERVER if name.startswith(SERVER) else CLIENT
    found = table[side].get("Fixed" if "Fixed" in name else "Adaptive")
    return [found] if found else []


def federation(name, train, *, rounds=1, clients=4, table=OURS, library=flower, old=None, inner=None, **settings):
    """Return the parameters after some rounds, the wrapper and the grid."""
    wrapped = wrapper(name, library, clients=clients, inner=inner, **settings)
    grid = InProcess(train, clients, mods(name, table))
    made = wrapped.start(grid, record(old or OLD), num_rounds=rounds)
    return arrays_of(made.arrays), wrapped, grid


def moved(step):
    """Return a training that adds a step to the floating-point arrays and counts a batch."""

    def train(arrays, node):
        amount = step(node) if callable(step) else step
        return {k: (x + amount).astype(x.dtype) if x.dtype.kind == "f" else x + 1 for k, x in arrays.items()}

    return train


class Accountant:
    """Flower's protocol of an accountant. Its own needs a package more."""

    config = PrivacyConfig(
        target_delta=1e-5,
        neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        population_size=100,
        sampling_method=SamplingMethod.NO_AMPLIFICATION,
    )

    def __init__(self):
        self.events = []

    def compose(self, event):
        self.events.append(event)

    def get_privacy_spent(self):
        return PrivacySpent(
            epsilon=float(len(self.events)), delta=1e-5, num_releases=len(self.events), accounting_method="counted"
        )

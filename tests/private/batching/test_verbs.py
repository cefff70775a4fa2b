"""Functions over the leaves of trees, and programs that are kept."""

import copy
import pickle

import numpy as np

from gradclip._src.private.batching.verbs import Programs, mapped


def test_leaves_at_one_place_go_together():
    tree, other = {"a": np.array(3.0), "b": [np.array(4.0)]}, {"a": 1.0, "b": [2.0]}
    assert mapped(lambda x, y: float(x * y), tree, other) == {"a": 3.0, "b": [8.0]}


def test_a_copy_starts_without_programs():
    programs = Programs({"of a shape": object()})
    for other in (copy.copy(programs), copy.deepcopy(programs), pickle.loads(pickle.dumps(programs))):
        assert type(other) is Programs
        assert not other

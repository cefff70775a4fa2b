"""Which parameters share a norm, and which threshold it has: parameter groups, and patterns of names."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.core.norms import EUCLIDEAN
from gradclip._src.inplace.groups import parts_of
from gradclip._src.passed.parameters import ParameterList


def holder(*numbers):
    return SimpleNamespace(grad=np.array(numbers or (3.0, 4.0)))


def parts(parameters, max_norm=1.0, *, alone=True):
    return parts_of(ParameterList.of(parameters, own_thresholds=True), max_norm, alone=alone)


def told(found):
    return [(part.name, part.threshold(EUCLIDEAN), list(part.places)) for part in found]


def test_groups_without_a_threshold_share_the_common_one():
    groups = [
        {"params": [holder()]},
        {"params": [holder(), holder()], "max_norm": 2.0, "name": "head"},
        {"params": (one for one in [holder()])},
        {"params": [], "max_norm": None},
        {"params": holder(), "max_norm": 0.0},
    ]
    assert told(parts(groups)) == [
        ("common", 1.0, [0, 3]),
        ("head", 2.0, [1, 2]),
        ("parameters.3", float("inf"), []),
        ("parameters.4", 0.0, [4]),
    ]


def test_without_a_common_group_there_is_no_common_part():
    groups = [
        {"params": [holder()], "max_norm": 2.0, "name": "a"},
        {"params": [holder()], "max_norm": 3.0, "name": "a"},
    ]
    assert told(parts(groups)) == [("a", 2.0, [0]), ("a (2)", 3.0, [1])]


NAMES = ("encoder.0.weight", "encoder.0.bias", "head.weight", "head.bias")


def named(names=NAMES):
    return {name: holder() for name in names}


@pytest.mark.parametrize(
    ("thresholds", "places"),
    [
        ({"encoder.*": 1.0, "*": 0.5}, [[0, 1], [2, 3]]),
        ({"*.bias": None, "*": 0.5}, [[1, 3], [0, 2]]),
        ({"head.weight": 2.0, "head.*": 1.0, "*": 0.5}, [[2], [3], [0, 1]]),
        ({"encoder.[01].weight": 1, "?ead.*": 2, "*": 3}, [[0], [2, 3], [1]]),
    ],
)
def test_the_first_pattern_that_matches_a_name_counts(thresholds, places):
    found = parts(named(), thresholds)
    assert [list(part.places) for part in found] == places
    assert [part.name for part in found] == list(thresholds)
    assert [part.max_norm for part in found] == list(thresholds.values())


def test_names_come_from_pairs_and_groups_and_trees():
    pairs, thresholds = list(named().items()), {"encoder.*": 1.0, "*": 0.5}
    groups = [{"params": pairs[:1]}, {"params": [one for _, one in pairs[1:]], "param_names": NAMES[1:]}]
    tree = {"encoder": [{"weight": np.ones(2), "bias": np.ones(1)}], "head": {"weight": np.ones(2), "n": np.arange(2)}}
    for parameters in (pairs, iter(pairs), groups):
        assert [list(part.places) for part in parts(parameters, thresholds)] == [[0, 1], [2, 3]]
    # The keys of a dict are sorted, and integers are no gradients.
    assert [list(part.places) for part in parts(tree, {"*.bias": 1.0, "head.*": 2.0, "*": 3.0})] == [[0], [2], [1]]


@pytest.mark.parametrize(
    ("thresholds", "error"),
    [
        ({"encoder.*": 1.0}, r"no pattern of max_norm matches head\.weight\. Add one, such as '\*' at the end"),
        ({"encodr.*": 1.0, "*": 0.5}, r"the pattern 'encodr\.\*' of max_norm matches no name\. The names are encoder"),
        ({"*": 0.5, "head.*": 1.0}, r"'head\.\*' of max_norm gets no parameter: patterns before it match all"),
        ({"Encoder.*": 1.0, "*": 0.5}, r"'Encoder\.\*' of max_norm matches no name"),
    ],
)
def test_patterns_that_do_not_fit(thresholds, error):
    with pytest.raises(ValueError, match=error):
        parts(named(), thresholds)
    with pytest.raises(ValueError, match="matches" if "matches" in error else "gets no parameter"):
        gradclip.clip_grad_norm_(named(), thresholds)


def test_beside_other_processes_a_pattern_may_match_nothing_here():
    assert told(parts(named(), {"decoder.*": 2.0, "*": 0.5}, alone=False))[0] == ("decoder.*", 2.0, [])


@pytest.mark.parametrize("thresholds", [{}, {0: 1.0}, {("a", "b"): 1.0}, {None: 1.0}])
def test_what_is_no_pattern(thresholds):
    with pytest.raises(TypeError, match=r"max_norm maps patterns of the names of parameters to thresholds, such as"):
        parts(named(), thresholds)


def test_parameters_without_names_have_no_pattern():
    advice = r"parameters.*has no name that a pattern of max_norm could match\. "
    for parameters in ([holder()], holder()):
        with pytest.raises(ValueError, match=f"{advice}Pass model"):
            parts(parameters, {"*": 1.0})
    with pytest.raises(ValueError, match=f"{advice}Make the optimizer with model"):
        parts([{"params": [holder()]}], {"*": 1.0})


def test_thresholds_of_groups_and_of_patterns_together():
    with pytest.raises(ValueError, match="thresholds come twice"):
        parts([{"params": list(named().items()), "max_norm": 1.0}], {"*": 1.0})


def test_a_parameter_has_one_threshold():
    one, frozen = holder(), SimpleNamespace(grad=None)
    for twice in (one, frozen):
        groups = [{"params": [holder(), twice]}, {"params": [twice], "max_norm": 2.0}]
        with pytest.raises(ValueError, match=r"parameters\[1\]\['params'\]\[0\] occurs twice, under two thresholds"):
            parts(groups)
        with pytest.raises(ValueError, match=r"^b occurs twice, under two thresholds"):
            parts({"a": twice, "b": twice}, {"a": 1.0, "*": 0.5})
    assert told(parts({"a": one, "b": one}, {"*": 0.5})) == [("*", 0.5, [0, 1])]
    shared = np.ones(2)
    with pytest.raises(ValueError, match=r"^b occurs twice"):
        parts({"a": shared, "b": shared}, {"a": 1.0, "*": 0.5})
    groups = [{"params": [one]}, {"params": [one]}, {"params": [holder()], "max_norm": 1.0}]
    assert told(parts(groups))[0] == ("common", 1.0, [0, 1])


def test_an_adaptive_threshold_follows_one_norm():
    adaptive = gradclip.AdaptiveThreshold()
    groups = [{"params": [holder()]}, {"params": [holder()], "max_norm": adaptive}]
    with pytest.raises(ValueError, match=r"max_norm and parameters\[1\]\['max_norm'\] are the same AdaptiveThreshold"):
        parts(groups, adaptive)
    with pytest.raises(ValueError, match=r"max_norm\['head\.\*'\] and max_norm\['\*'\] are the same AdaptiveThreshold"):
        parts(named(), {"head.*": adaptive, "*": adaptive})


def test_optimizers_keep_the_key():
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    groups = [{"params": weights[:1], "max_norm": 0.5}, {"params": weights[1:]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    assert [part.max_norm for part in parts(optimizer.param_groups)] == [1.0, 0.5]
    again = torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:]}], lr=0.1)
    again.load_state_dict(optimizer.state_dict())
    assert [part.max_norm for part in parts(again.param_groups)] == [1.0, 0.5]

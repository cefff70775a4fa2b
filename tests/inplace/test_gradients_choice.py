"""Which parameters count: a list without the others, or all, of which the others seem to have no gradient."""

from types import SimpleNamespace

import numpy as np
import pytest

from gradclip._src.inplace.gradients import chosen, others_left, without_integers
from gradclip._src.passed.leaves import EVERY, Choice
from gradclip._src.passed.parameters import ParameterList


def named(**grads):
    return {name: SimpleNamespace(grad=None if grad is None else np.array(grad)) for name, grad in grads.items()}


def test_groups_keep_their_sizes_and_processes():
    made = named(a=[1.0], b=None, c=[2.0], d=[3.0])
    pairs = list(made.items())
    params = ParameterList.of([{"params": pairs[:1]}, {"params": pairs[1:], "process_group": "gloo"}])
    only = chosen(params, Choice(["b", "d"]), alone=True)
    assert (only.sizes, only.names, only.parameters) == ([0, 2], ["b", "d"], [made["b"], made["d"]])
    assert (only.beside, only.groups) == (params.beside, params.groups)
    assert list(only.left.values()) == [made["a"], made["c"]]


def test_others_seem_to_have_no_gradient():
    made = named(a=[1.0], b=None, c=[2.0])
    params = others_left(ParameterList.of(made), Choice("c"), alone=True)
    assert params.parameters == list(made.values())
    assert [grad is None for grad in params.gradients] == [True, True, False]
    assert list(params.left.values()) == [made["a"]]
    assert made["a"].grad.tolist() == [1.0]


def test_nothing_is_chosen_here_but_perhaps_elsewhere():
    made = named(a=[1.0])
    with pytest.raises(ValueError, match="where chooses none of the names: 'x' matches none of a"):
        chosen(ParameterList.of(made), Choice("x"), alone=True)
    assert chosen(ParameterList.of(made), Choice("x"), alone=False).parameters == []
    group = [{"params": list(made.items()), "process_group": "gloo"}]
    assert chosen(ParameterList.of(group), Choice("x"), alone=True).parameters == []


def test_the_usual_call_gets_what_it_gave():
    params = ParameterList.of(named(a=[1.0]))
    assert chosen(params, EVERY, alone=True) is params
    assert others_left(params, EVERY, alone=True) is params


def test_integers_are_left_or_refused():
    made = named(a=[1.0], n=[1], m=[True])
    params = ParameterList.of(made)
    assert list(without_integers(params).left.values()) == [made["n"], made["m"]]
    with pytest.raises(TypeError, match=r"n\.grad has dtype int64, m\.grad has dtype bool\. If these are gradients"):
        without_integers(chosen(params, Choice(None, "raise"), alone=True))
    assert without_integers(ParameterList.of(named(n=[1], b=None))) is None
    assert without_integers(ParameterList.of(named(a=[1.0], b=None))) is None

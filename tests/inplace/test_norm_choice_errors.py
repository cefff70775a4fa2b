"""`where=` and `integers=` in place: errors say what to do, integers stay."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.dtypes import float0

import gradclip
from choice_calls import CALLS, EACH, TREES, called, holders, values

ERRORS = {
    "nothing chosen": (
        ValueError,
        r"where chooses none .*: 'x' matches none of (w, n|n, w)\.",
        {"where": "x"},
    ),
    "no pattern": (TypeError, "where must be a pattern", {"where": 1}),
    "unknown word": (ValueError, "integers must be 'keep'", {"integers": "convert"}),
    "integers": (TypeError, r"refuses integers: (n\.grad|\['n'\]) has dtype int64", {"integers": "raise"}),
    "chosen integers": (TypeError, r"refuses integers: (n\.grad|\['n'\])", {"integers": "raise", "where": ["n", "w"]}),
    "only integers": (TypeError, r"(n\.grad|\['n'\]) has dtype int64", {"where": "n"}),
}


@pytest.mark.after_error
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", [*CALLS, *EACH])
def test_errors_change_nothing(call, error):
    kind, match, arguments = ERRORS[error]
    function = {**CALLS, **EACH}[call]
    for make in (np.array, torch.tensor):
        parameters = {"w": SimpleNamespace(grad=make([3.0, 4.0])), "n": SimpleNamespace(grad=make([100]))}
        with pytest.raises(kind, match=match):
            function(parameters, **arguments)
        assert [one.grad.tolist() for one in parameters.values()] == [[3.0, 4.0], [100]]
    tree = {"w": np.array([3.0, 4.0]), "n": np.array([100])}
    if call in TREES:
        with pytest.raises(kind, match=match):
            TREES[call](tree, **arguments)
        assert tree["w"].tolist() == [3.0, 4.0]


NO_NAME = r"has no name that where could match\. "


def test_names_are_needed():
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    for call in (*CALLS.values(), lambda p, **k: gradclip.clip_grad_layer_norm_(p, 1.0, **k)):
        for given in ([parameter], parameter):
            with pytest.raises(ValueError, match=rf"{NO_NAME}Pass model\.named_parameters\(\), or a dict"):
                call(given, where="w")
        with pytest.raises(ValueError, match=rf"{NO_NAME}Make the optimizer with model\.named_parameters\(\), or"):
            call([{"params": [parameter]}], where="w")
    assert parameter.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("call", [*CALLS, *EACH])
def test_integers_in_place_of_gradients_stay_and_count_nothing(framework, call):
    names = ("body.w", "body.b", "body.none")
    alone, mixed = holders(framework, names), holders(framework, names)
    counter = framework.array([100, 7], "int32")
    mixed = {"body.n": SimpleNamespace(grad=counter), **mixed}
    function = {**CALLS, **EACH}[call]
    found, expected = called(framework, function, mixed), called(framework, function, alone)
    assert mixed["body.n"].grad is counter
    assert framework.to_numpy(counter).tolist() == [100, 7]
    for name, x in values(framework, alone).items():
        np.testing.assert_array_equal(values(framework, mixed)[name], x)
    if call in EACH:
        assert float(found[0]) == 0.0
        found = found[1:]
    for x, y in zip(*(one if call in EACH else [one] for one in (found, expected)), strict=True):
        np.testing.assert_array_equal(x, y)


LEFT = [lambda: 3, lambda: True, lambda: np.int8(3), lambda: np.array([1]), lambda: np.zeros(3, float0)]


@pytest.mark.parametrize("make", [np.array, torch.tensor, jnp.array])
@pytest.mark.parametrize("integer", LEFT)
def test_all_integers_stay_as_in_trees(make, integer):
    for function, expected in ((gradclip.grad_norm, 5.0), *((EACH[name], [5.0, 0.0]) for name in list(EACH)[:1])):
        named = {"a": SimpleNamespace(grad=make([3.0, 4.0])), "n": SimpleNamespace(grad=integer())}
        kept = named["n"].grad
        assert function(named) == expected
        assert named["n"].grad is kept
        if getattr(kept, "dtype", None) != float0:
            with pytest.raises(TypeError, match=r"refuses integers: n\.grad (is|has dtype) .*If these are gradients"):
                function(named, integers="raise")


def test_a_number_beside_tensors():
    named = {"a": SimpleNamespace(grad=torch.ones(2)), "x": SimpleNamespace(grad=2.0)}
    with pytest.raises(TypeError, match=r"x\.grad is 2\.0 of type float, beside tensors\. Convert it to a tensor\."):
        gradclip.clip_grad_norm_(named, 1.0)

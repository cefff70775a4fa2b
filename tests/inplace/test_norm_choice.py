"""`where=` and `integers=` in place: what is not chosen is neither measured nor written."""

import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from choice_calls import CALLS, EACH, TREES, WHERE, called, chosen_only, holders, values
from gradclip._src.core.formats import bare_name
from gradclip._src.inplace.norm import checked_choice, chosen_parameters
from gradclip._src.passed.leaves import Choice


@pytest.mark.parametrize("call", [*CALLS, *EACH])
def test_as_if_the_others_were_not_there(framework, call):
    mixed, alone = holders(framework), chosen_only(holders(framework))
    before = {name: one.grad for name, one in mixed.items()}
    function = {**CALLS, **EACH}[call]
    found, expected = called(framework, function, mixed, where=WHERE), called(framework, function, alone)
    for name, x in values(framework, mixed).items():
        of_alone = values(framework, alone)
        np.testing.assert_array_equal(
            x, of_alone[name] if name in of_alone else values(framework, holders(framework))[name]
        )
        if name not in alone:
            assert mixed[name].grad is before[name]
    if call in CALLS:
        np.testing.assert_array_equal(found, expected)
        return
    norms = dict(zip(mixed, found, strict=True))
    assert [norms[name] for name in ("body.none", "other")] == [None, None]
    assert [(float(norms[name]), bare_name(norms[name].dtype)) for name in ("head", "n")] == [(0.0, "float32")] * 2
    for name, norm in zip(alone, expected, strict=True):
        np.testing.assert_array_equal(norms[name], norm)


SPELLINGS = {
    "dict": dict,
    "pairs": lambda p: list(p.items()),
    "generator": lambda p: iter(p.items()),
    "groups": lambda p: [{"params": list(p.items())[:2]}, {"params": list(p.items())[2:]}],
    "param_names": lambda p: [{"params": list(p.values()), "param_names": list(p), "lr": 0.1}],
}


@pytest.mark.parametrize("monitored", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("where", [WHERE, ["body.w", "body.?"], lambda name: "body" in name])
def test_spellings(spelling, where, monitored):
    made = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("body.w", "head", "body.b")}
    for parameter, grad in zip(made.values(), ([3.0, 0.0], [math.inf, 1.0], [0.0, 4.0]), strict=True):
        parameter.grad = torch.tensor(grad)
    monitor = gradclip.Monitor(layers_every=1) if monitored else None
    assert gradclip.grad_norm(SPELLINGS[spelling](made), where=where) == 5.0
    assert gradclip.clip_grad_norm_(SPELLINGS[spelling](made), 1.0, where=where, monitor=monitor) == 5.0
    torch.testing.assert_close(made["body.w"].grad, torch.tensor([0.6, 0.0]))
    torch.testing.assert_close(made["body.b"].grad, torch.tensor([0.0, 0.8]))
    assert made["head"].grad.tolist() == [math.inf, 1.0]
    if monitor is not None:
        assert monitor.last.norm == 5.0
        assert monitor.layers.names == ("body.w", "body.b")


@pytest.mark.parametrize("processes", [{}, {"process_group": []}])
@pytest.mark.parametrize("spelling", [lambda p: iter(p.items()), lambda p: [{"params": iter(p.items())}]])
@pytest.mark.parametrize("call", [*CALLS, "clip_grad_layer_norm_"])
def test_names_that_are_read_once(call, spelling, processes):
    if processes and call in ("clip_grads_with_norm_", "clip_grad_value_"):
        return
    made, listed = ({n: SimpleNamespace(grad=np.array([3.0, 4.0])) for n in ("body.w", "head")} for _ in range(2))
    function = {**CALLS, **EACH}[call]
    found, expected = function(spelling(made), where=WHERE, **processes), function(listed, where=WHERE)
    np.testing.assert_array_equal(found, expected)
    assert made["body.w"].grad.tolist() == listed["body.w"].grad.tolist()
    assert made["head"].grad.tolist() == [3.0, 4.0]


def test_groups_keep_their_thresholds():
    named = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("a.w", "a.b", "c.w", "c.b")}
    for parameter in named.values():
        parameter.grad = torch.tensor([3.0, 4.0])
    pairs = list(named.items())
    groups = [{"params": pairs[:2], "max_norm": 0.5}, {"params": pairs[2:]}]
    norm = gradclip.clip_grad_norm_(groups, 1.0, where="*.w")
    torch.testing.assert_close(norm, torch.tensor(50.0).sqrt())
    assert [round(float(p.grad.norm()), 5) for p in named.values()] == [0.5, 5.0, 1.0, 5.0]
    gradclip.clip_grad_norm_(groups, 0.1, where="c.*")  # nothing is left of the first group
    assert [round(float(p.grad.norm()), 5) for p in named.values()] == [0.5, 5.0, 0.01961, 0.09806]


def test_patterns_of_thresholds_look_at_chosen_names_only():
    update = {"a": np.array([3.0, 4.0]), "b": np.array([math.nan])}
    assert gradclip.clip_grad_norm_(update, {"a": 1.0}, where="a") == 5.0
    assert update["a"].tolist() == pytest.approx([0.6, 0.8])
    with pytest.raises(ValueError, match=r"the pattern 'b' of max_norm matches no name\. The names are a"):
        gradclip.clip_grad_norm_(update, {"a": 1.0, "b": 1.0}, where="a")


def test_a_parameter_under_two_names_counts_once_if_one_is_chosen():
    shared = torch.nn.Parameter(torch.zeros(2))
    shared.grad = torch.tensor([3.0, 4.0])
    for where in ("a", "b", "*"):
        assert gradclip.grad_norm([("a", shared), ("b", shared)], where=where) == 5.0
    norms = gradclip.clip_grad_layer_norm_([("a", shared), ("b", shared)], 1.0, where="a")
    assert [float(norm) for norm in norms] == [5.0, 5.0]
    torch.testing.assert_close(shared.grad, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize(
    "call", ["clip_grad_norm_", "clip_grad_norm_, not clipped", "clip_grad_layer_norm_", "clip_grad_value_"]
)
def test_memory_that_is_shared_with_what_is_left_is_not_written(call):
    buffer = torch.tensor([3.0, 4.0, 12.0])
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    a.grad, b.grad = buffer[:2], buffer[1:]
    alone = torch.nn.Parameter(torch.zeros(2))
    alone.grad = torch.tensor([3.0, 4.0])
    function = {**CALLS, **EACH}[call]
    found, expected = function({"a": a, "b": b}, where="a"), function({"a": alone})
    assert b.grad.tolist() == [4.0, 12.0]
    assert torch.equal(a.grad, alone.grad)
    assert str(found).startswith(str(expected)[:-1])


def test_integers_beside_do_not_hide_memory_that_is_shared_with_what_is_left():
    buffer = np.array([3.0, 4.0])
    left, n, chosen = (SimpleNamespace(grad=grad) for grad in (buffer, np.array([100]), buffer[:]))
    assert gradclip.clip_grad_norm_({"left": left, "n": n, "chosen": chosen}, 1.0, where=["n", "chosen"]) == 5.0
    assert (left.grad.tolist(), n.grad.tolist()) == ([3.0, 4.0], [100])
    assert chosen.grad.tolist() == pytest.approx([0.6, 0.8])


@pytest.mark.parametrize("other", [lambda: jnp.ones(3), lambda: np.array(["a", None]), lambda: "a", lambda: [1.0]])
@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_what_is_left_may_be_anything(make, other):
    named = {"a": SimpleNamespace(grad=make([3.0, 4.0])), "b": SimpleNamespace(grad=other())}
    kept = named["b"].grad
    for function in (CALLS["clip_grad_norm_"], EACH["clip_grad_layer_norm_"]):
        function(named, where="a")
        assert named["b"].grad is kept


def test_arrays_of_a_tree_cannot_be_replaced():
    array = np.array([3.0, 4.0])
    update = {"a": array, "b": array[1:]}
    for call in (
        lambda **k: gradclip.clip_grad_norm_(update, 1.0, **k),
        lambda **k: gradclip.clip_grad_layer_norm_(update, 1.0, **k),
    ):
        with pytest.raises(ValueError, match=r"\['a'\] share memory with arrays that do not count\. Pass copies"):
            call(where="a")
    assert array.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("call", TREES)
def test_trees_of_arrays(call):
    body = lambda: {"w": np.array([[3.0, -0.5], [-4.0, 1.5]]), "b": np.array([0.25, 12.0])}
    locked = np.array([math.nan, 1.0])
    locked.flags.writeable = False
    update, alone = {"body": body(), "head": locked, "steps": np.array(7)}, {"body": body()}
    found, expected = TREES[call](update, where=[WHERE, "steps"]), TREES[call](alone)
    for name, array in alone["body"].items():
        np.testing.assert_array_equal(update["body"][name], array)
    if isinstance(expected, dict):
        assert (float(found.pop("head")), float(found.pop("steps"))) == (0.0, 0.0)
        for name, norms in expected["body"].items():
            np.testing.assert_array_equal(found["body"][name], norms)
    else:
        assert found == expected


@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_layer_norm_"])
def test_compiled_code_chooses_too(call):
    def named():
        made = {name: torch.nn.Parameter(torch.zeros(2)) for name in ("body.w", "head", "body.b")}
        for parameter, grad in zip(made.values(), ([3.0, 0.0], [6.0, 1.0], [0.0, 4.0]), strict=True):
            parameter.grad = torch.tensor(grad)
        return made

    function = {**CALLS, **EACH}[call]
    torch.compiler.reset()
    compiled = torch.compile(lambda p: function(p, where=WHERE), backend="eager", fullgraph=True)
    found, expected = named(), named()
    torch.testing.assert_close(compiled(found), function(expected, where=WHERE))
    for one, other in zip(found.values(), expected.values(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    assert found["head"].grad.tolist() == [6.0, 1.0]


def test_the_warning_of_no_gradient_speaks_of_the_chosen():
    named = {"a": SimpleNamespace(grad=np.ones(2)), "b": SimpleNamespace(grad=None)}
    for call in (gradclip.grad_norm, CALLS["clip_grad_norm_"]):
        with pytest.warns(UserWarning, match="^no parameter that where chooses has a gradient, so the norm is 0"):
            assert call(named, where="b") == 0


def test_parameters_are_listed_and_chosen():
    named = {name: SimpleNamespace(grad=np.ones(1)) for name in ("a", "b", "c")}
    params = chosen_parameters(named, Choice(["a", "c"]), None, None)
    assert (list(params.names), list(params.left.values())) == (["a", "c"], [named["b"]])
    assert params.parameters == [named["a"], named["c"]]
    assert checked_choice((None, "raise"), named, None, None).refuses

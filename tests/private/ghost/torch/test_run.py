"""What a run keeps of each parameter."""

import torch
from torch.autograd.graph import get_gradient_edge

from gradclip._src.private.ghost.records import Made
from gradclip._src.private.ghost.torch.layout import layout_of
from gradclip._src.private.ghost.torch.run import ForwardPass, Leaf, Tap, as_multiplied, current_level, unviewed


def test_copies_are_made_once_and_kept_as_one_term():
    run, found = ForwardPass(3), []
    leaf = Leaf(torch.ones(2), 3, tapped=True)
    tap = Tap(run, leaf, layout_of((2,)), leaf.weight)

    def look(x):
        run.level = current_level()
        child = Tap(run, leaf, layout_of((2,)), leaf.weight, (tap, lambda copies: copies * 2))
        found.append((tap.copies(), tap.copies(), child.copies()))
        return (found[-1][2] * x).sum()

    values = torch.func.vmap(look)(torch.tensor([1.0, 2.0, 3.0]))
    assert found[0][0] is found[0][1]
    assert values.tolist() == [4.0, 8.0, 12.0]
    (term,) = leaf.terms
    (cotangents,) = torch.autograd.grad(values.sum(), run.edges)
    made = term.finish(cotangents)
    assert isinstance(made, Made)
    assert made.rows.tolist() == [[2.0, 2.0], [4.0, 4.0], [6.0, 6.0]]


def test_the_first_reason_stays():
    leaf = Leaf(torch.ones(2), 3, tapped=True)
    leaf.untap("one")
    leaf.untap("two")
    assert (leaf.tapped, leaf.reason) == (False, "one")
    never = Leaf(torch.ones(2), 3, tapped=False)
    never.untap("one")
    assert never.reason == ""


def test_a_run_that_does_not_record_keeps_nothing():
    run = ForwardPass(3)
    leaf = Leaf(torch.ones(4, 2), 3, tapped=True)
    bias = Leaf(torch.ones(4), 3, tapped=True)
    run.recording = False
    made = torch.ones(3, 4)
    Tap(run, leaf, layout_of((4, 2)), leaf.weight).keep_term(None, 1, "linear", made, made, lambda e: e)
    Tap(run, bias, layout_of((4,)), bias.weight).keep_bias((), (3, 4), "linear")
    assert (leaf.terms, bias.terms, bias.reason, run.edges) == ([], [], "", [])


def test_results_are_no_views():
    x = torch.ones(2, 3, requires_grad=True)
    y = (x * 2).view(6)
    own = unviewed(y)
    assert own.data_ptr() == y.data_ptr()
    edge = get_gradient_edge(own)
    own.relu_()
    (cotangent,) = torch.autograd.grad(own.sum(), [edge])
    assert cotangent.tolist() == [1.0] * 6
    assert unviewed(x) is x


def test_inputs_are_rounded_as_in_the_product():
    x = torch.ones(2, requires_grad=True)
    assert as_multiplied(x, torch.ones(2, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert not as_multiplied(x, x).requires_grad

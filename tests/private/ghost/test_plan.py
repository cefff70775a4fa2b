"""Plans: which way is chosen, why, and the table."""

from dataclasses import replace

import pytest

from gradclip._src.private.ghost.plan import Autograd, planned
from gradclip._src.private.ghost.records import LeafUses, MatrixPlace, Use

XLA = Autograd(addition=8.0, convolution=1.0)
TORCH = Autograd(addition=70.0, convolution=4.0)


def leaf(rows, columns, *uses, reason=""):
    place = MatrixPlace((0, 0), (rows, columns), (rows, columns), (), (0,), (1,))
    of_place = tuple(Use(place, terms, name == "embedding", name) for name, terms in uses)
    return LeafUses(f"['{rows}x{columns}']", (rows, columns), "float32", of_place, reason)


def how(one, examples=256, method="auto", autograd=XLA):
    return planned([one], examples, method, autograd).leaves[0].how


@pytest.mark.parametrize(
    ("one", "chosen"),
    [
        (leaf(784, 1000, ("dot_general", 1)), "ghost"),
        (leaf(10000, 128, ("embedding", 32)), "ghost"),
        (leaf(256, 768, ("dot_general", 512)), "autograd"),
        (leaf(30, 30, ("dot_general", 1)), "autograd"),
        (leaf(784, 1000, reason="cond"), "autograd"),
        (leaf(784, 1000), "autograd"),
        (leaf(4, 1024, ("dot_general", 2**17)), "autograd"),
    ],
)
def test_the_way_is_chosen(one, chosen):
    assert how(one) == chosen


def test_a_convolution_in_pytorch_is_one_product():
    assert how(leaf(800, 32, ("conv2d", 49)), autograd=TORCH) == "product"


def test_what_saves_little_in_a_batch_is_made():
    one = leaf(64, 64, ("dot_general", 1))
    assert [how(one, examples) for examples in (1, 256)] == ["autograd", "ghost"]


def test_what_saves_less_than_the_calls_of_a_framework_is_made():
    slow = XLA._replace(calls=8e7)
    leaves = [leaf(128, 128, ("linear", 1)), leaf(128, 129, ("linear", 1))]
    ways = [{one.how for one in planned(leaves, examples, "auto", slow).leaves} for examples in (16, 64)]
    assert ways == [{"autograd"}, {"ghost"}]


@pytest.mark.parametrize("method", ["auto", "ghost"])
def test_what_the_framework_cannot_make_comes_in_factors(method):
    small = replace(leaf(8, 8, ("linear", 3)), only_tapped=True)
    unknown = replace(leaf(8, 8, reason="cond"), only_tapped=True)
    plan = planned([small, unknown], 2, method, TORCH._replace(calls=8e7))
    assert [one.how for one in plan.leaves] == ["ghost", "autograd"]
    assert plan.leaves[0].why == "the framework makes none of a whole batch"


def test_gradients_that_take_too_much_memory_are_not_made():
    one = leaf(4096, 4096, ("dot_general", 300))
    assert [how(one, examples) for examples in (8, 32)] == ["autograd", "ghost"]


def test_ghost_is_what_was_asked_for_or_an_error():
    assert how(leaf(256, 768, ("dot_general", 512)), method="ghost") == "ghost"
    assert how(leaf(30, 30, ("dot_general", 1)), method="ghost") == "autograd"
    with pytest.raises(
        ValueError, match=r"method='ghost' cannot measure \['784x1000'\] of shape \(784, 1000\).*: cond\."
    ):
        planned([leaf(784, 1000, reason="cond")], 8, "ghost", XLA)


def test_terms_may_cancel_only_where_there_are_several():
    assert not planned([leaf(784, 1000, ("dot_general", 1))], 256, "auto", XLA).cancels
    assert planned([leaf(10000, 128, ("embedding", 32))], 256, "auto", XLA).cancels


def test_the_table():
    plan = planned([leaf(784, 1000, ("dot_general", 1)), leaf(784, 1000, reason="cond")], 256, "auto", XLA)
    assert plan.ghost
    assert plan.tapped == (True, False)
    assert str(plan).splitlines() == [
        "for 256 examples at a time",
        "parameter     shape     uses                measured by  MiB made  MiB kept  why",
        "['784x1000']  784x1000  dot_general, T = 1  ghost        765.6     1.7       26.3 times less work",
        "['784x1000']  784x1000  -                   autograd     765.6     -         cond",
    ]

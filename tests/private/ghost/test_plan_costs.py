"""Costs of the three ways, for layers of known networks."""

import math

import pytest

from gradclip._src.private.ghost.plan import Autograd, costs_of, parts_of
from gradclip._src.private.ghost.records import LeafUses, MatrixPlace, Use

XLA, TORCH = Autograd(addition=8.0, convolution=1.0), Autograd(addition=70.0, convolution=4.0)


def matrix(rows, columns):
    return MatrixPlace((0, 0), (rows, columns), (rows, columns), (), (0,), (1,))


def leaf_of(*uses):
    place = uses[0].place
    return LeafUses("w", place.view, "float32", uses)


def test_one_term_needs_no_gradient():
    costs = costs_of(leaf_of(Use(matrix(1000, 1000), 1, False, "dot_general")), 4, XLA)
    assert costs.ghost < costs.product / 20
    assert costs.kept == 4 * 2000


def test_long_sequences_are_cheaper_as_one_product():
    costs = costs_of(leaf_of(Use(matrix(256, 768), 512, False, "dot_general")), 4, XLA)
    assert costs.product == costs.autograd < costs.ghost / 5


@pytest.mark.parametrize("autograd", [XLA, TORCH])
def test_each_iteration_of_a_loop_adds_to_a_gradient(autograd):
    once = costs_of(leaf_of(Use(matrix(128, 384), 32, False, "linear")), 4, autograd)
    looped = costs_of(leaf_of(Use(matrix(128, 384), 32, False, "linear", additions=32)), 4, autograd)
    separate = costs_of(leaf_of(*[Use(matrix(128, 384), 1, False, "linear")] * 32), 4, autograd)
    assert looped == separate
    assert looped.autograd - once.autograd == 31 * autograd.addition * 128 * 384
    assert (looped.ghost, looped.product, looped.kept) == (once.ghost, once.product, once.kept)


def test_an_embedding_is_not_made():
    costs = costs_of(leaf_of(Use(matrix(10000, 128), 32, True, "embedding")), 4, TORCH)
    assert costs.product == math.inf
    assert costs.ghost < costs.autograd / 100


def test_convolutions_are_slow_in_pytorch():
    use = Use(matrix(800, 32), 49, False, "conv2d")
    assert costs_of(leaf_of(use), 4, TORCH).autograd > costs_of(leaf_of(use), 4, XLA).autograd


def test_uses_of_one_place_are_one_part():
    first, second = matrix(4, 2), MatrixPlace((0, 0), (2, 2), (2, 2), (), (0,), (1,))
    uses = [Use(first, 1, False, "a"), Use(second, 2, False, "b"), Use(first, 3, True, "c")]
    assert parts_of(uses) == [[uses[0], uses[2]], [uses[1]]]

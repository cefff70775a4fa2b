"""Tensors of one example inside `torch.func.vmap`, and those of all examples behind them."""

import torch

from gradclip._src.private.ghost.torch.run import batch_of, current_level, hooks_are_set, memory_of, one_of

X = torch.arange(12.0).reshape(3, 4)


def test_the_batch_behind_an_example():
    found = []

    def look(x):
        level = current_level()
        found.extend(batch_of(y, level, 3) for y in (x, x.t(), torch.arange(2)))
        return one_of(found[0] * 2, level)

    made = torch.func.vmap(look, in_dims=2)(X.reshape(2, 2, 3))
    assert torch.equal(found[0], X.reshape(2, 2, 3).movedim(2, 0))
    assert torch.equal(found[1], found[0].mT)
    assert torch.equal(found[2], torch.arange(2).expand(3, 2))
    assert torch.equal(made, found[0] * 2)


def test_tensors_of_another_level_are_the_same_for_all():
    found = []

    def outer(x):
        level = current_level()

        def inner(y):
            assert current_level() == level + 1
            found.append(batch_of(x, level + 1, 2).shape)
            return y

        return torch.func.vmap(inner)(torch.ones(2)).sum() + x.sum()

    torch.func.vmap(outer)(X)
    assert found == [(2, 4)]
    assert current_level() is None


def test_the_memory_behind_an_example():
    found = []
    torch.func.vmap(lambda x: found.append(memory_of(x)) or x)(X)
    assert found == [X.data_ptr()]
    assert memory_of(X) == X.data_ptr()


def test_hooks_of_saved_tensors_are_seen():
    assert not hooks_are_set()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert hooks_are_set()
    assert not hooks_are_set()

"""Spikes in trainers of several processes: equal norms, and each process has the loss and examples of its own."""

from pathlib import Path

import pytest

import processes
from test_spikes import BAD

WORKER = Path(__file__).with_name("spikes_worker.py")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    names = ["in_lightning", "of_two_optimizers", "in_the_trainer", "of_shards"]
    return processes.run(WORKER, tmp_path_factory.mktemp("processes"), 2, names)


def check(each):
    first, second = each
    assert first["norms"] == second["norms"]
    for one in each:
        assert one["contexts"] == one["seen"]
    assert not {*map(tuple, first["contexts"])} & {*map(tuple, second["contexts"])}
    for norm, *both in zip(
        first["norms"], *([zip(x["losses"], x["contexts"], strict=True) for x in each]), strict=True
    ):
        assert (norm > 100) == any(BAD in context for _, context in both)
        assert all((loss > 1000) == (BAD in context) for loss, context in both)


def test_in_lightning(found):
    each = [one["in_lightning"] for one in found]
    check(each)
    assert all(one["losses"] == pytest.approx(one["own"], rel=1e-6) for one in each)
    assert [before for before, _ in each[0]["logged"]] == each[0]["norms"]
    assert [after for _, after in each[0]["logged"]] == pytest.approx([min(norm, 1.0) for norm in each[0]["norms"]])
    assert each[1]["logged"] == []


def test_two_optimizers_in_lightning(found):
    for each in zip(*(one["of_two_optimizers"] for one in found), strict=True):
        check(each)
        assert all(one["losses"] == pytest.approx(one["own"], rel=1e-6) for one in each)


def test_in_the_trainer(found):
    each = [one["in_the_trainer"] for one in found]
    check(each)
    assert each[0]["logged"] == each[1]["logged"]
    assert [before for before, _ in each[0]["logged"]] == each[0]["norms"]
    means = [sum(both) / 2 for both in zip(*(one["losses"] for one in each), strict=True)]
    assert each[0]["means"] == pytest.approx(means, rel=1e-5)


def test_gradients_of_shards_count_each_backward_pass(found):
    assert [one["of_shards"] for one in found] == [[3.0, 12.0]] * 2

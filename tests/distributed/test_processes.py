"""Who makes an in-place call: one process where nothing says otherwise."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gradclip._src.core.norms import Order
from gradclip._src.distributed.processes import ONE_PROCESS, processes_of
from gradclip._src.passed.parameters import ParameterList


@pytest.mark.parametrize("make", [np.ones, torch.ones])
def test_one_process_where_no_group_is_named(make):
    members = ParameterList.of([SimpleNamespace(grad=make(2))])
    assert processes_of(members, None, None) is ONE_PROCESS


def test_one_process_has_nothing_to_agree_on():
    with ONE_PROCESS.preparing():
        assert ONE_PROCESS.ask(Order(2.0), None, 1.0) is None
        assert list(ONE_PROCESS.nothing()) == []


def test_an_error_of_one_process_passes():
    with pytest.raises(KeyError), ONE_PROCESS.preparing():
        raise KeyError

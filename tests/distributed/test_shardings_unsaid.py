"""Shards that look like whole gradients are refused, unless a parameter group says who has the rest."""

import pytest
import torch

from gradclip._src.distributed.shardings import check_unsaid
from gradclip._src.passed.parameters import ParameterList


def flat_shard():
    p = torch.nn.Parameter(torch.ones(3))
    p._fsdp_flattened = True
    return p


def test_flat_shards_need_a_process_group():
    with pytest.raises(ValueError, match=r"FSDP1.*process_group=model\.process_group"):
        check_unsaid(ParameterList.of([torch.nn.Parameter(torch.ones(2)), flat_shard()]))


def test_a_parameter_group_may_name_it():
    check_unsaid(ParameterList.of([{"params": [flat_shard()], "process_group": []}]))


def test_whole_parameters_need_none():
    check_unsaid(ParameterList.of([torch.nn.Parameter(torch.ones(3))]))

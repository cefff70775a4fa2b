"""What is asked of leaves and of this process before a backend is chosen."""

import numpy as np
import torch
import torch.distributed.tensor  # without it nobody looks

from gradclip._src.backends import among_several, any_distributed, whole_scalar


def test_one_process_has_no_distributed_tensors():
    assert not any_distributed([torch.ones(2), np.ones(2), 3.0])
    assert not any_distributed([])
    assert not among_several()


def test_what_is_not_distributed_is_whole():
    for value in (2.0, np.float32(2), torch.tensor(2.0)):
        assert whole_scalar(value) is value

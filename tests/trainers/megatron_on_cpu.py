"""Stand-ins for what Megatron-Core asks of CUDA, so that its own classes run on the CPU."""

import torch
from torch.overrides import TorchFunctionMode


class OnCpu(TorchFunctionMode):
    """What is asked for on a GPU is on the CPU, and says that it is on a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        found = function(*args, **kwargs)
        # Megatron asserts that gradients have the type "torch.cuda.FloatTensor".
        return found.replace("torch.", "torch.cuda.") if function is torch.Tensor.type and len(args) == 1 else found


def stand_in():
    """Put the stand-ins into torch, for the rest of this process."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    for kind in ("FloatTensor", "IntTensor", "HalfTensor", "BFloat16Tensor"):
        setattr(torch.cuda, kind, getattr(torch, kind))
    # Megatron has functions compiled when it is imported, and PyTorch's compiler takes seconds to load.
    torch.compile = lambda function, **_: function
    OnCpu().__enter__()

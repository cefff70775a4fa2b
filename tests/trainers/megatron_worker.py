"""Short trainings by Megatron-Core, in one or several processes, for test_megatron.py. Each writes a file of JSON."""

import math
from functools import lru_cache, partial
from itertools import product

import torch
import torch.distributed as dist

import megatron_on_cpu
import worker
from worker import FOLDER, RANK, RANKS

megatron_on_cpu.stand_in()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import gradclip  # noqa: E402
from gradclip import clip_at_step  # noqa: E402
from plain_calls import outcomes, said  # noqa: E402

# Adam whose denominator is almost LARGE: the weights move by the gradient that was applied, as with SGD.
LARGE = 1e8
ADAM = {"optimizer": "adam", "lr": LARGE, "adam_eps": LARGE, "adam_beta1": 0.0, "weight_decay": 0.0}
FLAGS = {"float32": {}, "bfloat16": {"bf16": True}, "float16": {"fp16": True, "initial_loss_scale": 4.0}}
KINDS = {"float32": {}, "float16": {"dtype": "float16"}, "distributed": {"distributed": True}}
SPLITS = {
    "": {},
    "tensor": {"tensor_model_parallel_size": RANKS},
    "pipeline": {"pipeline_model_parallel_size": RANKS},
    "expert": {"expert_model_parallel_size": RANKS},
}


@lru_cache(maxsize=1)
def split_ranks(split):
    """Make the groups of ranks, unless these are the last that were made."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(**SPLITS[split])


class Model(torch.nn.Module):
    """Two weights that ranks share, unless it is split into stages of a pipeline, and two of its own."""

    def __init__(self, dtype, split):
        super().__init__()
        names = ("own",) if split == "pipeline" and RANK > 0 else ("shared", "own")
        for name in names:
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(1, 2, dtype=dtype)))
        self.own.tensor_model_parallel = split == "tensor"
        self.own.allreduce = split != "expert"

    def forward(self, **inputs):
        return sum((p * inputs[name]).sum() for name, p in self.named_parameters())


class Training:
    """A training whose gradient has the same value in all weights, of which there are four, or six if it is split.

    Where ranks take the mean of a gradient, each has twice the value in half of the weights, and 0 in the others.
    """

    def __init__(self, dtype="float32", *, split="", distributed=False, single=False, **config):
        split_ranks(split)
        self.split, self.dtype, self.distributed = split, getattr(torch, dtype), distributed
        self.module = Model(self.dtype, split)
        how = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
        sizes = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        self.model = DistributedDataParallel(sizes, how, self.module)
        config = ADAM | FLAGS[dtype] | {"clip_grad": 3.0, "use_distributed_optimizer": distributed} | config
        self.optimizer = get_megatron_optimizer(OptimizerConfig(**config), [self.model])
        if single:
            (self.optimizer,) = self.optimizer.chained_optimizers

    def backward(self, norm):
        value = norm / math.sqrt(6 if self.split else 4)
        mean = value * RANKS * torch.tensor([RANK % RANKS == 0, RANK == RANKS - 1])
        whole = torch.full((2,), value)
        own = {"": mean, "expert": RANKS * whole}.get(self.split, whole)
        shared = mean if self.split in ("", "expert") else whole
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.model(shared=shared.to(self.dtype), own=own.to(self.dtype))
        self.optimizer.scale_loss(loss).backward()
        self.model.finish_grad_sync()

    def step(self, norm):
        """Train one update, and return the norm of what was applied."""
        before = self.weights()
        self.backward(norm)
        self.updated, self.reported, _ = self.optimizer.step()
        return float((self.weights() - before).norm())

    @property
    def saved(self):
        """What has the state of the optimizer. Megatron-Core 0.16.1 cannot load a share of that of PyTorch's Adam."""
        return self.optimizer.chained_optimizers[0].optimizer if self.distributed else self.optimizer

    def save(self, path, **more):
        torch.save({"model": self.module.state_dict(), "optimizer": self.saved.state_dict(), **more}, path)

    def load(self, path):
        state = torch.load(path, weights_only=False)
        self.module.load_state_dict(state["model"])
        self.saved.load_state_dict(state["optimizer"])
        self.optimizer.reload_model_params()
        return state

    def weights(self):
        """Return all weights of the model: those that ranks share once."""
        here = {name: p.detach().double().flatten().tolist() for name, p in self.module.named_parameters()}
        ranks = [None] * RANKS
        dist.all_gather_object(ranks, here)
        own = [one["own"] for one in (ranks if self.split else ranks[:1])]
        return torch.tensor(sum(own, ranks[0]["shared"]))


def twice_the_median():
    return gradclip.AdaptiveThreshold(gradclip.QuantileRule(factor=2.0))


def spike(**settings):
    """Train with norms of 7.8, and then one of 1,238."""
    training, monitor = Training(**settings), gradclip.Monitor()
    optimizer = training.optimizer
    clipping = clip_at_step(optimizer, twice_the_median(), monitor=monitor)
    seen = []
    for norm in (7.8,) * 4 + (1238.0,):
        applied = training.step(norm)
        seen.append((applied, clipping.norm, float(clipping.max_norm.max_norm), training.reported))
    clipping.remove()
    return {
        "optimizers": [type(one).__name__ for one in (optimizer, *getattr(optimizer, "chained_optimizers", ()))],
        "seen": seen,
        "counts": list(monitor.counts),
        "recorded": [(step.norm, step.max_norm) for step in monitor.records],
        "after": training.step(1238.0),
        "left": "step" in vars(optimizer),
    }


def chained():
    return [spike(dtype=dtype, distributed=distributed) for dtype, distributed in product(FLAGS, (False, True))]


def single():
    return [spike(**settings, single=True) for settings in KINDS.values()]


def splits():
    splits = filter(None, SPLITS)
    return [spike(split=split, distributed=distributed) for split, distributed in product(splits, (False, True))]


def not_finite():
    """Train with a norm, then a gradient that is NaN, then a norm again."""
    found = []
    for settings in KINDS.values():
        training, monitor = Training(**settings), gradclip.Monitor()
        clipping = clip_at_step(training.optimizer, twice_the_median(), monitor=monitor)
        seen = [(training.step(norm), training.updated, clipping.norm) for norm in (1.0, math.nan, 1.0)]
        kept = clipping.max_norm
        found.append([seen, list(monitor.counts), kept.steps, kept.num_skipped, int(kept.history.count)])
    return found


def fixed():
    """Megatron itself is set to clip nothing."""
    training, monitor = Training(clip_grad=0.0), gradclip.Monitor()
    clipping = clip_at_step(training.optimizer, 2.0, monitor=monitor)
    applied = [training.step(5.0)]
    clipping.max_norm = math.inf
    applied.append(training.step(5.0))
    clipping.max_norm = 1.0
    applied.append(training.step(0.5))
    clipping.remove()
    applied.append(training.step(5.0))
    return {"applied": applied, "thresholds": [step.max_norm for step in monitor.records]}


def sharing():
    """Follow one of two optimizers that have the same configuration, and let one of its steps fail."""
    training, other = Training(), Training()
    config = training.optimizer.config
    for one in (other.optimizer, *other.optimizer.chained_optimizers):
        one.config = config
    clipping = clip_at_step(training.optimizer, 2.0)
    applied = [training.step(5.0), other.step(5.0), config.clip_grad]
    config.clip_grad = 4.0
    inner = training.optimizer.step_with_ready_grads
    training.optimizer.step_with_ready_grads = None
    failed = said(lambda: training.step(5.0))
    training.optimizer.step_with_ready_grads = inner
    applied += [other.step(5.0), training.step(5.0)]
    clipping.remove()
    return {"applied": [*applied, training.step(5.0)], "failed": failed}


def resumed():
    """Train five updates at once, and three and two around a checkpoint."""
    norms, ends = (3.0, 4.0, 5.0, 7.0, 400.0), []
    for name, settings in KINDS.items():
        training, again = Training(**settings), Training(**settings)
        clipping, followed = (clip_at_step(one.optimizer, twice_the_median()) for one in (training, again))
        for norm in norms[:3]:
            training.step(norm)
        training.save(FOLDER / f"{name}{RANK}.pt", clipping=clipping.state_dict())
        followed.load_state_dict(again.load(FOLDER / f"{name}{RANK}.pt")["clipping"])
        for norm in norms[3:]:
            training.step(norm)
            again.step(norm)
        for one, run in ((clipping, training), (followed, again)):
            ends.append([float(one.max_norm.max_norm), one.norm, *run.weights().tolist()])
    return ends


def refused():
    training = Training()
    clipping = clip_at_step(training.optimizer, 1.0)
    skipping = gradclip.AdaptiveThreshold(skip_above=4.0)
    optimizers = [
        Training(**settings, single=single).optimizer for settings in KINDS.values() for single in (True, False)
    ]
    return {
        "guarded": [said(partial(gradclip.guard, one, 1.0)) for one in optimizers],
        "twice": said(lambda: clip_at_step(training.optimizer, 1.0)),
        "zero": said(lambda: clip_at_step(Training().optimizer, 0.0)),
        "skip_above": said(lambda: clip_at_step(Training().optimizer, skipping)),
        "assigned": said(lambda: setattr(clipping, "max_norm", skipping)),
        "None": said(lambda: clip_at_step(None, 1.0)),
        "a model": said(lambda: clip_at_step(training.model, 1.0)),
        "a configuration": said(lambda: clip_at_step(training.optimizer.config, 1.0)),
    }


def plain_calls():
    """Call gradclip's functions on the parameters of each kind after backward, and on those of its optimizer."""
    found = []
    for settings in KINDS.values():
        training = Training(**settings)
        before = training.weights()
        training.backward(5.0)
        told = outcomes(list(training.module.parameters()), training.optimizer.param_groups)
        training.optimizer.step()
        found.append([told, float((training.weights() - before).norm())])
    return found


def disagreeing():
    """Rank 1 gets another threshold."""
    training = Training(distributed=True)
    clipping = clip_at_step(training.optimizer, twice_the_median())
    training.step(4.0)
    if RANK == 1:
        clipping.max_norm = 5.0  # here alone
    before = training.weights()
    told = said(lambda: training.step(400.0))
    return {"told": told, "moved": float((training.weights() - before).norm())}


def failing():
    """The threshold of rank 1 becomes 0, which is an error there."""
    training = Training()
    rule = gradclip.QuantileRule(upper=0.0 if RANK == 1 else 1.0)
    clip_at_step(training.optimizer, gradclip.AdaptiveThreshold(rule))
    return said(lambda: training.step(4.0))


if __name__ == "__main__":
    worker.run(globals())

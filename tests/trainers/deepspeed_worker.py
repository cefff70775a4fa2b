"""Short trainings by DeepSpeed, in one or several processes, for test_deepspeed.py. Each writes a file of JSON."""

import os
from functools import partial

import torch

import worker
from worker import FOLDER, RANK, RANKS

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param

import gradclip
from gradclip import clip_at_step
from plain_calls import outcomes, said

# DeepSpeed allows float16 where oneDNN computes in it, which few processors do. PyTorch's own kernels do on all.
get_accelerator().is_fp16_supported = lambda: True

SIZE = 4
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def twice_the_median():
    return gradclip.AdaptiveThreshold(gradclip.QuantileRule(factor=2.0))


class Training:
    """An engine whose gradient is `norm` / 2 in each of the four weights, so that its norm is `norm`.

    With two processes, each has twice that in two of the weights, so that only their mean has this norm. It is SGD with
    the learning rate 1, so that the weights move by the gradient that was applied.
    """

    def __init__(self, stage=0, micro_batches=1, **config):
        self.model = torch.nn.Linear(SIZE, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        zero = {"stage": stage, **config.pop("zero", {})}
        self.micro_batches = micro_batches
        self.dtype = torch.float16 if "fp16" in config else torch.bfloat16 if "bf16" in config else torch.float32
        config = {
            "train_batch_size": micro_batches * RANKS,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": 3.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
            **({"zero_optimization": zero} if stage else {}),
            **config,
        }
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.engine, *_ = deepspeed.initialize(model=self.model, optimizer=optimizer, config=config)

    @property
    def weights(self):
        weight = next(self.engine.module.parameters())
        held = hasattr(weight, "ds_id") or hasattr(weight, "_hp_mapping")
        return (safe_get_full_fp32_param(weight) if held else weight.detach()).double().flatten().clone()

    def backward(self, norm):
        x = torch.full((1, SIZE), norm / 2)
        if RANKS == 2:
            x *= 2.0 * torch.tensor([RANK == 0, RANK == 1] * 2)
        self.engine.backward(self.engine(x.to(self.dtype)).sum())

    def step(self, norm):
        """Train one update, and return the norm of what was applied."""
        before = self.weights
        for _ in range(self.micro_batches):
            self.backward(norm)
            self.engine.step()
        return float((self.weights - before).norm())


def spike(**config):
    """Train with norms of 7.8, and then one of 1,238."""
    training, monitor = Training(**config), gradclip.Monitor()
    clipping = clip_at_step(training.engine, twice_the_median(), monitor=monitor)
    seen = [(training.step(norm), clipping.norm, float(clipping.max_norm.max_norm)) for norm in (7.8,) * 4 + (1238.0,)]
    reported = float(training.engine.get_global_grad_norm())
    clipping.remove()
    return {
        "seen": seen,
        "reported": reported,
        "counts": list(monitor.counts),
        "recorded": [(step.norm, step.max_norm) for step in monitor.records],
        "after": training.step(1238.0),
        "left": [name for name in ("_take_model_step", "clip_fp32_gradients") if name in vars(training.engine)],
    }


def stages():
    return [spike(stage=stage) for stage in range(4)]


def offloaded():
    return [spike(stage=stage, zero=OFFLOADED) for stage in (1, 2, 3)]


def bfloat16():
    in_float32 = {"grad_accum_dtype": "fp32"}
    return [spike(stage=stage, bf16={"enabled": True}) for stage in (0, 1, 3)] + [
        spike(stage=1, bf16={"enabled": True}, data_types=in_float32)
    ]


def float16():
    return [spike(stage=stage, fp16={"enabled": True, "loss_scale": 4}) for stage in (0, 1)]


def accumulation():
    found = []
    for stage in (0, 1, 2, 3):
        training = Training(stage, micro_batches=3)
        clipping = clip_at_step(training.engine, 2.0)
        norms = []
        for _ in range(6):
            training.backward(5.0)
            training.engine.step()
            norms.append(clipping.norm)
        found.append({"norms": norms, "moved": float(training.weights.norm())})
    return found


def not_finite():
    """Train with a norm, then a gradient that is NaN, then a norm again."""
    found = []
    for config in ({"stage": 1}, {"stage": 3}, {"stage": 1, "fp16": {"enabled": True, "initial_scale_power": 3}}):
        training, monitor = Training(**config), gradclip.Monitor()
        clipping = clip_at_step(training.engine, twice_the_median(), monitor=monitor)
        applied = [training.step(norm) for norm in (1.0, float("nan"), 1.0)]
        kept = clipping.max_norm
        found.append([applied, list(monitor.counts), kept.steps, kept.num_skipped, int(kept.history.count)])
    return found


def fixed():
    training, monitor = Training(2), gradclip.Monitor()
    clipping = clip_at_step(training.engine, 2.0, monitor=monitor)
    applied = [training.step(5.0)]
    clipping.max_norm = float("inf")
    applied.append(training.step(5.0))
    clipping.max_norm = 1.0
    applied.append(training.step(0.5))
    return {"applied": applied, "thresholds": [step.max_norm for step in monitor.records]}


def resumed():
    """Train five updates at once, and three and two around a checkpoint."""
    norms, ends = (3.0, 4.0, 5.0, 7.0, 400.0), []
    for stage in (0, 1, 3):
        training = Training(stage)
        clipping = clip_at_step(training.engine, twice_the_median())
        for norm in norms[:3]:
            training.step(norm)
        folder = FOLDER / f"checkpoint{stage}"
        training.engine.save_checkpoint(folder, client_state={"clipping": clipping.state_dict()})
        again = Training(stage)
        followed = clip_at_step(again.engine, twice_the_median())
        _, state = again.engine.load_checkpoint(folder)
        followed.load_state_dict(state["clipping"])
        for norm in norms[3:]:
            training.step(norm)
            again.step(norm)
        ends += [
            [*map(float, (one.max_norm.max_norm, one.norm, *run.weights))]
            for one, run in ((clipping, training), (followed, again))
        ]
    return ends


def refused():
    training = Training(1)
    clipping = clip_at_step(training.engine, 1.0)
    without_norm = Training(1, zero={"compute_grad_norm": False}, gradient_clipping=0.0)
    own_steps = {f"optimizer of stage {stage}": Training(stage).engine.optimizer for stage in (1, 2, 3)}
    return {
        **{name: said(partial(clip_at_step, one, 1.0)) for name, one in own_steps.items()},
        **{f"guarded {name}": said(partial(gradclip.guard, one)) for name, one in own_steps.items()},
        "twice": said(lambda: clip_at_step(training.engine, 1.0)),
        "zero": said(lambda: clip_at_step(Training(2).engine, 0.0)),
        "skip_above": said(lambda: clip_at_step(Training(2).engine, gradclip.AdaptiveThreshold(skip_above=4.0))),
        "assigned": said(lambda: setattr(clipping, "max_norm", gradclip.AdaptiveThreshold(skip_above=4.0))),
        "a model": said(lambda: clip_at_step(training.model, 1.0)),
        "a tuple": said(lambda: clip_at_step((training.engine, None), 1.0)),
        "no norm": said(lambda: clip_at_step(without_norm.engine, 1.0)),
        "no optimizer": said(
            lambda: clip_at_step(
                deepspeed.initialize(model=torch.nn.Linear(2, 2), config={"train_batch_size": RANKS})[0], 1.0
            )
        ),
    }


def plain_calls():
    """Call gradclip's functions on the parameters of each stage after backward, and on those of its optimizer."""
    found = []
    for config in (
        {"stage": 1},
        {"stage": 2},
        {"stage": 3},
        {"stage": 1, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    ):
        training = Training(**config)
        training.backward(5.0)
        told = outcomes(list(training.engine.module.parameters()), training.engine.optimizer.param_groups)
        before = training.weights
        training.engine.step()
        found.append([told, float((training.weights - before).norm())])
    return found


def disagreeing():
    """Rank 1 gets another threshold."""
    training = Training(2)
    clipping = clip_at_step(training.engine, twice_the_median())
    training.step(4.0)
    if RANK == 1:
        clipping.max_norm = 5.0  # here alone
    before = training.weights
    try:
        training.step(400.0)
    except RuntimeError as error:
        told = str(error)
    return {"told": told, "moved": float((training.weights - before).norm())}


def failing():
    """The threshold of rank 1 becomes 0, which is an error there."""
    training = Training(1)
    rule = gradclip.QuantileRule(upper=0.0 if RANK == 1 else 1.0)
    clip_at_step(training.engine, gradclip.AdaptiveThreshold(rule))
    try:
        training.step(4.0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    worker.run(globals(), partial(deepspeed.init_distributed, auto_mpi_discovery=False, verbose=False))

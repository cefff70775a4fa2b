"""Logs of one short run, in each format that gradclip reads, as the programs write them."""

import gzip
import io
import json
import math

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

STEPS = range(10, 410, 10)
NORMS = [40.0 if step == 200 else 1.0 + 0.5 * math.sin(step) for step in STEPS]
LOSSES = [2.0 / (1 + step / 100) for step in STEPS]
RUN = list(zip(STEPS, NORMS, LOSSES, strict=True))


def entries():
    steps = [
        {"epoch": step / 100, "grad_norm": norm, "learning_rate": 1e-4, "loss": loss, "step": step}
        for step, norm, loss in RUN
    ]
    return [*steps, {"eval_loss": 1.0, "epoch": 4.0, "step": 400}, {"train_loss": 1.0, "step": 400}]


def trainer_state():
    return json.dumps({"best_metric": None, "global_step": 400, "log_history": entries(), "max_steps": 400}, indent=2)


def json_lines():
    return "".join(json.dumps(entry) + "\n" for entry in entries())


def monitor_lines():
    lines = [
        {"step": step, "norm": norm, "max_norm": 0.5, "clipped": True, "skipped": False, "loss": loss}
        for step, norm, loss in RUN
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def table():
    return "step,loss,grad_norm\n" + "".join(f"{step},{loss!r},{norm!r}\n" for step, norm, loss in RUN)


def exported_table():
    """As Weights & Biases exports a chart."""
    rows = "".join(f'"{step}","{norm!r}","{norm!r}","{norm!r}"\n' for step, norm, _ in RUN)
    return '"Step","run-1 - train/grad_norm","run-1 - train/grad_norm__MIN","run-1 - train/grad_norm__MAX"\n' + rows


def megatron():
    head = "------------------------ arguments ------------------------\n  clip_grad ....................... 0.5\n"
    return head + "".join(
        f" [2025-09-07 23:58:47] iteration {step:8d}/  500000 | consumed samples: {step * 32:12d} | elapsed time per "
        f"iteration (ms): 438.3 | learning rate: 5.999998E-05 | global batch size:    32 | lm loss: {loss:.6E} | loss "
        f"scale: 131072.0 | grad norm: {norm:.3f} | number of skipped iterations:   {int(step == 20)} | number of nan "
        "iterations:   0 |\n"
        for step, norm, loss in RUN
    )


def torchtitan():
    return "[titan] INFO - Building llama3\n" + "".join(
        f"[titan] 2025-09-07 23:58:47,123 - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: {loss:8.5f}  "
        f"\x1b[38;2;180;60;0mgrad_norm: {norm:7.4f}  \x1b[36mmemory:  1.20GiB(1.26%)  \x1b[34mtps: 1,234\x1b[39m\n"
        for step, norm, loss in RUN
    )


def spaced():
    """Names and numbers with nothing but spaces between them."""
    return "".join(f"Iter {step}: Train loss {loss!r}, lr 1e-4, Grad norm {norm!r}\n" for step, norm, loss in RUN)


def alone():
    """A norm that is named norm, beside the loss."""
    return "max seqlen 1024\n" + "".join(
        f"step {step:4d}/400 | loss {loss!r} (+0.1z)| norm {norm!r} (+0.2z)| lr 1e-04 | 12.30 ms\n"
        for step, norm, loss in RUN
    )


def of_groups():
    """A norm for each group of parameters."""
    return "".join(
        f"tflops=1.5 step={step} loss={loss!r} grad_norm={{'0_default': {norm * 0.6!r}, '1_fp32': {norm * 0.8!r}}}\n"
        for step, norm, loss in RUN
    )


def with_updates():
    return "".join(
        f'INFO | train_inner | {{"epoch": 1, "loss": "{loss!r}", "num_updates": "{step}", "gnorm": "{norm!r}"}}\n'
        for step, norm, loss in RUN
    )


def nested(indent=None):
    """Each step as an object with objects in it."""
    steps = (
        {"training_iteration": step, "info": {"learner": {"stats": {"grad_gnorm": norm, "loss": loss}}}}
        for step, norm, loss in RUN
    )
    return "".join(json.dumps(one, indent=indent) + "\n" for one in steps)


def metric(values):
    """A file of one metric."""
    return "".join(f"{1_700_000_000_000 + step} {value!r} {step}\n" for step, value in zip(STEPS, values, strict=True))


def printed_by_trainer():
    return "".join(
        f"{{'loss': {loss:.4f}, 'grad_norm': {norm!r}, 'learning_rate': 5e-05, 'epoch': {step / 100}}}\n"
        for step, norm, loss in RUN
    )


def events():
    """As PyTorch's SummaryWriter writes."""
    found = record(VERSION)
    for step, norm, loss in RUN:
        for tag, value in (("train/loss", loss), ("train/grad_norm", norm)):
            found += record(event(step, tag, value))
    return found


def event(step, tag, value):
    return logged(step, Summary.Value(tag=tag, simple_value=value))


def logged(step, *values):
    return Event(wall_time=1.7e9, step=step, summary=Summary(value=values)).SerializeToString()


def record(data):
    written = io.BytesIO()
    RecordWriter(written).write(data)
    return written.getvalue()


VERSION = Event(wall_time=1.7e9, file_version="brain.Event:2").SerializeToString()
FILES = {
    "trainer_state.json": trainer_state,
    "list.json": lambda: json.dumps(entries()),
    "columns.json": lambda: json.dumps({"step": list(STEPS), "grad_norm": NORMS, "loss": LOSSES}),
    "lines.jsonl": json_lines,
    "monitor.jsonl": monitor_lines,
    "table.csv": table,
    "table.tsv": lambda: table().replace(",", "\t"),
    "exported.csv": exported_table,
    "megatron.log": megatron,
    "torchtitan.log": torchtitan,
    "trainer.log": printed_by_trainer,
    "spaced.log": spaced,
    "alone.log": alone,
    "groups.log": of_groups,
    "updates.log": with_updates,
    "nested.jsonl": nested,
    "indented.json": lambda: nested(indent=2),
    "history.json": lambda: json.dumps({"config": {"lr": 1e-4}, "tags": ["a"], "history": entries()}),
    "in_parts.csv": lambda: table().replace("grad_norm", "grad/norm/total"),
    "commented.csv": lambda: '# {"env": 1}\n#\n' + table(),
    "events.out.tfevents.1": events,
    "lines.jsonl.gz": lambda: gzip.compress(json_lines().encode(), mtime=0),
}


def written(folder, name):
    """Write a log, and return its path."""
    content = FILES[name]()
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path

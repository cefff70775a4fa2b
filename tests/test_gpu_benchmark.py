"""What benchmarks/gpu.py keeps of a run in which rows fail, that its calls clip, and what pages show of its results."""

import dataclasses
import importlib
import json
import runpy
from argparse import Namespace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
# A process with four rows. The second one raises an error, the third ends the process, the fourth never ends.
WORKER = """
import sys, time
sys.path.insert(0, {folder!r})
from gpu_worker import Row, answer, options_of
PLAN = [Row("one", "float32", str(number), "") for number in range(5)]
class Device:
    def wait(self):
        pass
def measure(row):
    if row.call == "1":
        raise ValueError("so it is\\nand more")
    if row.call == "2":
        sys.exit("no device any more")
    if row.call == "3":
        time.sleep(60)
    return {{"bytes": 8, "peer": "p", "times": {{"gradclip": {{"ms": 1.0, "host us": 2.0}}}}}}
answer(options_of(""), PLAN, lambda options: (Device(), {{"device": "A B", "cache": 4}}, measure))
"""


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("GRADCLIP_GPU_KERNELS", "0")  # contenders change it
    return importlib.import_module


def run(load, monkeypatch, out, parts, **options):
    gpu = load("gpu")
    monkeypatch.setattr(gpu, "PARTS", parts)
    given = {"seconds": 100.0, "turns": 0.01, "only": "", "device": "cpu", "small": True, "out": out}
    gpu.measure(Namespace(**{**given, **options}))


def worker(folder):
    script = folder / "worker.py"
    script.write_text(WORKER.format(folder=str(BENCHMARKS)))
    return str(script)


def test_what_fails_is_kept_and_the_rest_is_measured(load, monkeypatch, tmp_path, capsys):
    run(load, monkeypatch, tmp_path, {worker(tmp_path): 2})
    found = json.loads((tmp_path / "gpu-A-B.json").read_text())
    assert [row.get("error", "measured") for row in found["rows"]] == [
        "measured",
        "ValueError: so it is",
        "the process ended with 1: no device any more",
        "took more than 2 seconds",
        "measured",
    ]
    assert found["device"] == "A B"
    assert found["versions"]["torch"] == importlib.import_module("importlib.metadata").version("torch")
    assert "one, float32, 0: gradclip 1.00 ms, 2 us\n" in capsys.readouterr().out


def test_the_seconds_of_a_run_are_kept(load, monkeypatch, tmp_path):
    run(load, monkeypatch, tmp_path, {worker(tmp_path): 30}, only=", [03],", seconds=5.0)
    found = json.loads((tmp_path / "gpu-A-B.json").read_text())
    assert [row["call"] for row in found["rows"]] == ["0"]
    assert found["stopped at"] == "one, float32, 3"


def test_a_part_that_is_measured_again_leaves_the_rest(load, monkeypatch, tmp_path):
    parts = {worker(tmp_path): 30}
    kept = {"workload": "other", "dtype": "float32", "call": "0", "case": "", "error": "kept"}
    old = {"workload": "one", "dtype": "float32", "call": "4", "case": "", "error": "old"}
    (tmp_path / "gpu-A-B.json").write_text(json.dumps({"rows": [old, kept]}))
    run(load, monkeypatch, tmp_path, parts, only=", 4,")
    rows = json.loads((tmp_path / "gpu-A-B.json").read_text())["rows"]
    assert [row.get("error", "measured") for row in rows] == ["kept", "measured"]


def test_a_process_that_cannot_start_is_kept(load, monkeypatch, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("import no_such_module")
    run(load, monkeypatch, tmp_path, {str(script): 2})
    (row,) = json.loads((tmp_path / "unknown.json").read_text())["rows"]
    assert row["error"] == "the process ended with 1: ModuleNotFoundError: No module named 'no_such_module'"


def test_a_row_is_measured_on_the_cpu(load):
    _, described, measure = load("gpu_rows").prepare(Namespace(device="cpu", small=True, turns=0.0))
    row = measure(load("gpu_worker").Row("ResNet-50", "float16", "clip_grad_norm_", "clipped"))
    assert described["device"] == "CPU"
    assert row["bytes"] < 10**6
    assert set(row["times"]) == {"gradclip", "gradclip without kernels", "peer", "floor"}
    assert all(time > 0 for times in row["times"].values() for time in times.values())
    assert row["norm over threshold"] == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("call", ["clip_grad_norm_", "clip_grad_layer_norm_", "clip_grad_norm_, four groups"])
def test_every_clipped_call_clips(load, dtype, call):
    contenders = load("gpu_contenders")
    held = contenders.Gradients([(40, 30), (70,), (64,), (9, 8), (300,)], dtype, "cpu")
    found, how = contenders.contenders(held, call, "clipped")
    assert how == contenders.FALLS
    for turn in range(200):
        function, prepare = found[("gradclip", "peer")[turn % 2]]
        prepare()
        before = held.share()
        function()
        assert before > 1.01
        assert held.share() == pytest.approx(1.0, abs=0.01)


def test_a_call_that_is_not_clipped_and_a_functional_one_leave_the_gradients(load):
    contenders = load("gpu_contenders")
    held = contenders.Gradients([(40, 30), (70,)], torch.float32, "cpu")
    before = [grad.clone() for grad in held.grads]
    calls = [("clip_grad_norm_", "not clipped"), ("grad_norm", "not clipped"), ("clip_by_global_norm", "clipped")]
    for call, case in calls:
        for function, prepare in contenders.contenders(held, call, case)[0].values():
            prepare()
            function()
    assert all(map(torch.equal, held.grads, before))
    clipped, _ = contenders.contenders(held, "clip_by_global_norm", "clipped")[0]["gradclip"][0]()
    least = min(torch._foreach_norm(before))
    assert torch.stack(torch._foreach_norm(clipped)).norm() == pytest.approx(float(least) * 2**0.5 / 2, rel=1e-3)


def test_gradients_that_a_call_has_spoilt_are_refused(load):
    contenders = load("gpu_contenders")
    held = contenders.Gradients([(4,)], torch.float32, "cpu")
    held.grads[0].zero_()
    with pytest.raises(ValueError, match="would not clip"):
        contenders.contenders(held, "clip_grad_norm_", "clipped")


def test_the_most_telling_rows_come_first_and_each_once(load):
    plan = load("gpu_rows").plan()
    assert len(set(plan)) == len(plan)
    assert [row[1:] for row in plan[:4]] == [
        (dtype, "clip_grad_norm_", case) for dtype in ("float32", "bfloat16") for case in ("not clipped", "clipped")
    ]
    assert list(dict.fromkeys(row.workload for row in plan)) == list(load("workloads").ON_GPU)


def test_a_contender_that_fails_leaves_the_others(load):
    clock = load("gpu_clock")
    nothing = lambda: None
    contenders = {"good": (nothing, nothing), "bad": (lambda: 1 / 0, nothing)}
    turns, times, errors = clock.medians(clock.Device("cpu"), contenders, 0.0)
    assert turns == 5
    assert list(times) == ["good"]
    assert errors == {"bad": "ZeroDivisionError: division by zero"}


def a_row(case, ours, plain, peer, floor, **more):
    times = {"gradclip": ours, "gradclip without kernels": plain, "peer": peer, "floor": floor}
    of = {"workload": "W", "dtype": "float32", "call": "clip_grad_norm_", "case": case, "bytes": 100, "peer": "torch's"}
    return {**of, "times": {name: {"ms": ms, "host us": 1e3 * ms} for name, ms in times.items() if ms}, **more}


def made_up():
    versions = {"torch": "2.0", "triton": None, "jax": "0.1"}
    rows = [a_row("not clipped", 0.5, 0.75, 1.5, 0.25), a_row("clipped", 1.0, None, 1.25, 0.75)]
    rows += [a_row("", 2.0, 2.0, None, 0.5, call="other", errors={"peer": "TypeError: no"})]
    rows += [{"workload": "W", "dtype": "float16", "call": "other", "case": "", "error": "took more than 2 seconds"}]
    return {"device": "A B", "cache": 100, "copy GB/s": 4012.4, "versions": versions, "rows": rows}


SHOWN = """**A B** (PyTorch 2.0, JAX 0.1). A copy within the device reads and writes 4,012 GB/s.

| clip_grad_norm_, not clipped / clipped | gradclip, ms | without kernels, ms | library, ms | floor, ms \
| times as fast | gradclip, host us | library, host us |
|---|---|---|---|---|---|---|---|
| W, float32, in cache | 0.500 / 1.00 | 0.750 / – | 1.50 / 1.25 | 0.250 / 0.750 | 3.0 / 1.2 \
| 500 / 1,000 | 1,500 / 1,250 |

<details markdown="1"><summary>Other calls</summary>

| not clipped / clipped | gradclip, ms | without kernels, ms | library, ms | floor, ms \
| times as fast | gradclip, host us | library, host us |
|---|---|---|---|---|---|---|---|
| W, float32, other, in cache | 2.00 | 2.00 | – | 0.500 | – | 2,000 | – |

- clip_grad_norm_: the library is torch's.
- other: the library is torch's.

</details>

Not measured:

- W, float32, other: `peer: TypeError: no`
- W, float16, other: `took more than 2 seconds`
"""


def test_the_tables_of_a_device(load):
    assert load("gpu_tables").of_gpu([made_up()]) == SHOWN
    both = load("gpu_tables").of_gpu([made_up(), made_up()], "assets/gpu.svg")
    assert both.startswith("![Times of gradclip and PyTorch as multiples")
    assert both.endswith(f"(assets/gpu.svg)\n\n{SHOWN}\n{SHOWN}")


def test_the_page_has_a_choice_of_the_other_calls(load):
    rows = [
        a_row("", 1.0, None, None, None, workload=workload, dtype=dtype, call=call)
        for workload in "AB"
        for dtype in ("float32", "float16")
        for call in ("clip_grad_norm_", "other")
    ]
    rows.append(a_row("", 1.0, None, None, None, workload="C", dtype="float16", call="other"))
    shown = load("gpu_tables").of_gpu([{**made_up(), "rows": rows}])
    others = shown[shown.index("<details") :]
    assert [line.split(" |")[0] for line in others.splitlines() if line.startswith("| ")][1:] == [
        "| A, float32, other, in cache",
        "| C, float16, other, in cache",
    ]


def test_the_page_stays_until_a_gpu_has_been_timed(load, tmp_path):
    load("report")
    tables = runpy.run_path(str(BENCHMARKS / "tables.py"))["TABLES"]
    (table,) = (dataclasses.replace(table, measured=tmp_path) for table in tables if table.name == "gpu")
    assert table.current() == table.on_page()
    (tmp_path / "gpu-A-B.json").write_text(json.dumps(made_up()))
    assert SHOWN in table.current()


def test_the_picture_is_drawn_of_what_was_measured(load, monkeypatch, tmp_path, capsys):
    picture = load("gpu_picture")
    monkeypatch.setattr(picture, "GPU_PICTURE", tmp_path / "gpu.svg")
    monkeypatch.setattr(picture, "measured", list)
    picture.main()
    assert not (tmp_path / "gpu.svg").exists()
    assert "nothing to draw" in capsys.readouterr().out
    monkeypatch.setattr(picture, "measured", lambda: [made_up(), made_up()])
    picture.main()
    first = (tmp_path / "gpu.svg").read_bytes()
    picture.main()
    assert (tmp_path / "gpu.svg").read_bytes() == first
    assert first.startswith(b"<?xml")

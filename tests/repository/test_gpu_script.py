"""`make gpu`: each part has its share of the time, none ends the run, and results are written as they come."""

import sys
import time
import zipfile

import pytest

import gpu_job
import gpu_run
import gpu_wheels
from gpu_run import Part, Run, go, limit

SLOW = "import time\nprint('begun', flush=True)\ntry:\n    time.sleep(60)\n"
HEEDS = SLOW + "finally:\n    print('ended', flush=True)\n"
HEEDS_NOT = SLOW + "except KeyboardInterrupt:\n    time.sleep(60)\n"


def part(name, code, share=1, **settings):
    return Part(name, share, (sys.executable, "-c", code), **settings)


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Return a function that starts a run of some seconds, which writes to a folder of the test."""
    monkeypatch.setattr(gpu_job, "GRACE", 0.3)

    def start(seconds=30.0, **settings):
        return Run(tmp_path / "out", gpu_run.RESERVE + seconds, work=tmp_path / "work", **settings)

    return start


def run_parts(run, *parts):
    return go(run, [one.name for one in parts], run.work / "wheels", parts)


def lines(run):
    """Return the name and the status of each line of the summary."""
    first, *rest = run.summary.read_text("utf-8").splitlines()
    assert first == "part seconds status"
    return {line.split()[0]: line.split(maxsplit=2)[2] for line in rest}


def logged(run):
    return (run.out / "log.txt").read_text("utf-8")


def test_shares_are_of_the_time_that_is_left():
    one, three, six = (part(str(share), "", share) for share in (1, 3, 6))
    assert limit(one, [three, six], 100.0) == 10.0
    assert limit(three, [six], 99.0) == 33.0  # the first took a second only
    assert limit(six, [], 98.0) == 98.0


def test_a_failing_part_does_not_end_the_run(started, capsys):
    run = started()
    assert not run_parts(run, part("fails", "raise SystemExit(3)"), part("passes", "print('here')"))
    assert lines(run) == {"fails": "3", "passes": "0"}
    assert "\nhere\n" in logged(run)
    table = capsys.readouterr().out.splitlines()[-2:]
    assert [line.split()[0] for line in table] == ["fails", "passes"]
    assert table[0].endswith("failed, 3")
    assert table[1].endswith("passed")


def test_a_run_passes_if_all_parts_do(started):
    assert run_parts(started(), part("one", ""), part("other", ""))


def test_lines_are_written_as_they_come(started):
    run = started()
    reads = f"print(open({str(run.summary)!r}).read().splitlines()[-1])"
    run_parts(run, part("first", "raise SystemExit(4)"), part("reads", reads))
    said = [line.split() for line in logged(run).splitlines() if line.startswith("first ")]
    assert said[0][2] == "4"


@pytest.mark.parametrize(("code", "says"), [(HEEDS, True), (HEEDS_NOT, False)])
def test_a_part_that_takes_too_long_is_ended(started, code, says):
    run = started(4.0)
    began = time.monotonic()
    assert not run_parts(run, part("slow", code), part("next", ""))
    assert time.monotonic() - began < 4.0
    found = lines(run)
    assert found["slow"].startswith("stopped after 2 s")
    assert found["next"] == "0"
    assert ("ended" in logged(run)) == says


def test_without_time_a_part_does_not_begin(started):
    run = started(0.5)
    assert not run_parts(run, part("late", "print('begun')"))
    assert lines(run) == {"late": "no time left"}
    assert "begun" not in logged(run)


def test_a_part_knows_its_time_and_the_folder(started):
    run = started(20.0)
    told = Part("told", 1, (sys.executable, "-c", "import sys; print('told', *sys.argv[1:])", "{seconds}", "{out}"))
    run_parts(run, told)
    assert any(line in logged(run) for line in (f"\ntold {seconds} {run.out}\n" for seconds in (17, 18)))


@pytest.mark.parametrize("rehearse", [False, True])
def test_only_the_device_differs_in_a_rehearsal(started, rehearse):
    run = started(rehearse=rehearse)
    code = "import os, sys; print('got', os.environ.get('GRADCLIP_TEST_DEVICE'), *sys.argv[1:])"
    run_parts(run, part("asks", code, rehearsal=("--device", "cpu")))
    assert ("\ngot cpu --device cpu\n" if rehearse else "\ngot None\n") in logged(run)


def compiled_by(code, monkeypatch, run):
    """Run a part before and a part after the kernels are compiled, by some code instead of pip."""
    monkeypatch.setattr(gpu_run, "pip", lambda *_: [sys.executable, "-c", code])
    asks = "import os; print({!r}, os.environ['PYTHONPATH'].split(os.pathsep)[0])"
    parts = (part("before", asks.format("before"), compiled=False), part("after", asks.format("after")))
    passed = go(run, ["compile", "before", "after"], run.work, parts)
    assert list(lines(run)) == ["before", "compile", "after"]
    return passed


def test_kernels_are_used_once_they_are_compiled(started, monkeypatch):
    run = started()
    code = f"import os, time; os.makedirs({str(run.built / 'gradclip')!r}); time.sleep(1)"
    assert compiled_by(code, monkeypatch, run)
    assert f"\nbefore {run.site}\n" in logged(run)
    assert f"\nafter {run.built}\n" in logged(run)


def test_without_compiled_kernels_the_rest_runs(started, monkeypatch):
    run = started()
    code = f"import os; os.makedirs({str(run.built / 'gradclip')!r}); print('no compiler'); raise SystemExit(1)"
    assert not compiled_by(code, monkeypatch, run)
    assert "[compile] no compiler\n" in logged(run)
    assert f"\nafter {run.site}\n" in logged(run)
    assert lines(run)["after"] == "0"


def test_a_run_that_is_ended_ends_what_compiles(started, monkeypatch):
    run = started()

    def ended(*_):
        raise SystemExit(143)

    monkeypatch.setattr(gpu_run.Run, "finish", ended)
    monkeypatch.setattr(gpu_run, "pip", lambda *_: [sys.executable, "-c", "import time; time.sleep(60)"])
    with pytest.raises(SystemExit):
        go(run, ["compile", "one"], run.work, (part("one", ""),))
    assert run.compiling.process.returncode is not None


def test_each_part_has_a_share_and_what_it_runs():
    names = [one.name for one in gpu_run.PARTS]
    assert len(set(names)) == len(names)
    assert all(one.share > 0 for one in gpu_run.PARTS)
    files = {word.removeprefix("--ignore=") for one in gpu_run.PARTS for word in one.command}
    files = {word for word in files if word.startswith(("tests/", "benchmarks/", "scripts/"))}
    assert {"tests/gpu", "benchmarks/gpu.py"} <= files
    assert all((gpu_run.ROOT / name).exists() for name in files)


def made_wheel(folder, name, *required, size=0):
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as inside:
        inside.writestr(f"{name}-1.0.dist-info/METADATA", "".join(f"Requires-Dist: {line}\n" for line in required))
        inside.writestr("data", bytes(size))
    return path


def test_wheels_over_the_limit_are_an_error(tmp_path):
    wheels = [made_wheel(tmp_path, name, size=6000) for name in ("one", "other")]
    total = sum(wheel.stat().st_size for wheel in wheels)
    assert gpu_wheels.checked(wheels, total) == total
    with pytest.raises(SystemExit, match="at most 0 MB"):
        gpu_wheels.checked(wheels, total - 1)


def test_what_wheels_require_is_among_them_or_on_the_machine(tmp_path):
    required = ("numpy>=1", "other", 'tomli; python_version < "3.11"', 'x; extra == "y"')
    wheels = [made_wheel(tmp_path, "one_part", *required)]
    with pytest.raises(SystemExit, match="require other\\."):
        gpu_wheels.checked(wheels)
    gpu_wheels.checked([*wheels, made_wheel(tmp_path, "other", "one-part")])


def test_wheels_are_of_what_pyproject_requires():
    wanted = {gpu_wheels.name_of(line): line for line in gpu_wheels.wanted()}
    assert {"optree", "array-api-compat", "nanobind-backend", "opacus", "nanobind", "scikit-build-core"} <= set(wanted)
    assert "numpy" not in wanted
    assert wanted["nanobind-backend"] == "nanobind-backend>=1.0"

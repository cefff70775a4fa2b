"""Test and time gradclip on a bare machine with a GPU, within a given time, by `make gpu`.

Nothing is installed into the system. The wheels of `make gpu-wheels` and the compiled kernels go to `build/gpu`. Each
part has a share of the time that is left. A part that fails or takes too long does not end the run. Results are written
as they come: all output to `log.txt`, and a line for each part to `summary.txt`.

`--rehearse` runs the same on a machine without a GPU: the CPU takes its place, and Triton interprets the kernels.
"""

import argparse
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from gpu_job import Job, Log

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
RESERVE = 10  # seconds to end what takes too long
# After some errors of a GPU nothing works in a process, so what is likelier to cause one runs in a process of its own.
FIRST = ("tests/gpu/test_cuda.py", "tests/gpu/test_bound.py")
GRAPHS = ("tests/gpu/test_streams.py", "tests/gpu/test_graphs.py")
OTHERS = ("tests/gpu/test_jax.py", "tests/gpu/test_sharded.py", "tests/gpu/test_compiled.py")
PYTEST = (
    *(PYTHON, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "--confcutdir", "tests/gpu"),
    *("-p", "no:cacheprovider", "-p", "no:logging", "-o", "faulthandler_timeout=60", "-o", "markers=gpu: needs a GPU"),
    *("-m", "gpu", "-q", "-ra", "--tb=short", "--durations=15"),
)
WHEELS, COMPILE = "wheels", "compile"
CMAKE = f"cmake-{sys.implementation.cache_tag}"


def tests(name, *chosen):
    """Return the command of tests that also writes NAME.xml."""
    return (*PYTEST, f"--junitxml={{out}}/{name}.xml", *chosen)


@dataclass(frozen=True)
class Part:
    """A command, and its share of the time; `{out}` and `{seconds}` in it stand for the folder and its limit."""

    name: str
    share: int
    command: tuple[str, ...]
    settings: dict[str, str] = field(default_factory=dict)
    rehearsal: tuple[str, ...] = ()
    compiled: bool = True  # whether to wait for the C++ kernels


OFF = {"GRADCLIP_GPU_KERNELS": "0"}
PARTS = (
    Part("machine", 3, (PYTHON, "scripts/gpu_machine.py"), compiled=False),
    Part("kernels", 5, tests("kernels", *FIRST), compiled=False),
    Part("info", 1, (PYTHON, "-m", "gradclip", "info")),
    Part("tests", 4, tests("tests", *(f"--ignore={name}" for name in FIRST + GRAPHS + OTHERS), "tests/gpu")),
    Part("graphs", 2, tests("graphs", *GRAPHS)),
    Part("others", 3, tests("others", *OTHERS)),
    Part("without", 1, (*PYTEST, *FIRST), OFF),
    Part(
        "times",
        7,
        (PYTHON, "benchmarks/gpu.py", "--seconds", "{seconds}", "--out", "{out}"),
        rehearsal=("--device", "cpu", "--small"),
    ),
    Part("counts", 1, (PYTHON, "benchmarks/counts.py", "calls")),
)
NAMES = (WHEELS, COMPILE, *(part.name for part in PARTS))


def limit(part, later, left):
    """Return the seconds that a part may take of those that are left, if the later ones take all of theirs."""
    return left * part.share / (part.share + sum(one.share for one in later))


class Run:
    """One run: what it writes, when it has to end, and what became of each part."""

    def __init__(self, out, seconds, *, work=ROOT / "build" / "gpu", rehearse=False):
        self.ends = time.monotonic() + seconds - RESERVE
        self.out, self.work, self.rehearse = out.resolve(), work.resolve(), rehearse
        self.site, self.built = self.work / "site", self.work / "built"
        self.compiling, self.done = None, []
        for folder in (self.site, self.built):
            shutil.rmtree(folder, ignore_errors=True)
        for folder in (self.out, self.work):
            folder.mkdir(parents=True, exist_ok=True)
        self.log = Log(self.out / "log.txt")
        self.summary = self.out / "summary.txt"
        self.summary.write_text("part seconds status\n", "utf-8")

    def left(self):
        return self.ends - time.monotonic()

    def environment(self, settings):
        """Return the environment of a part, in which the compiled gradclip hides the one in src."""
        ready = self.compiling is None and (self.built / "gradclip").exists()
        folders = [*([self.built] if ready else []), self.site, "tests/support", "tests/exact", "tests", "src"]
        paths = [str(ROOT / folder) for folder in folders] + list(filter(None, [os.environ.get("PYTHONPATH")]))
        rehearsal = {"GRADCLIP_TEST_DEVICE": "cpu", "TRITON_INTERPRET": "1"} if self.rehearse else {}
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TRITON_CACHE_DIR": str(self.work / "triton"),
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **rehearsal,
            **settings,
        }

    def start(self, name, command, settings, *, prefix=""):
        self.log.say(f"== {name}, {self.left():.0f} seconds left: {' '.join(command)}")
        return Job(name, command, self.environment(settings), ROOT, self.log, prefix=prefix)

    def finish(self, job, seconds):
        """Wait for a job, and write its line of the summary."""
        self.note(job.name, *job.finish(max(0.0, seconds)))

    def note(self, name, seconds, status):
        self.done.append((name, seconds, status))
        line = f"{name} {seconds:.1f} {status}"
        with self.summary.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.log.say(f"== {line}\n")

    def install(self, wheels):
        """Unpack the wheels into a folder of this run."""
        if not (found := sorted(map(str, wheels.glob("*.whl")))):
            self.log.say(f"There are no wheels in {wheels}: `make gpu-wheels` collects them. What Python has is used.")
            return
        command = pip("--target", str(self.site), *found)
        self.finish(self.start(WHEELS, command, {}), min(60.0, self.left()))

    def compile(self):
        """Start to compile the C++ kernels. gradclip works without them, so a failure ends nothing."""
        processors = str(os.cpu_count() or 1)
        options = ["--no-build-isolation", "--target", str(self.built), f"-Cbuild-dir={self.work / CMAKE}"]
        cmake = self.site / "nanobind" / "cmake"
        if cmake.exists():  # the machine's own may be older
            options.append(f"-Ccmake.define.nanobind_DIR={cmake}")
        settings = {"GRADCLIP_REQUIRE_NATIVE": "1", "CMAKE_BUILD_PARALLEL_LEVEL": processors}
        self.compiling = self.start(COMPILE, pip(*options, "."), settings, prefix=f"[{COMPILE}] ")

    def compiled(self):
        """Wait for the C++ kernels, for a quarter of the time that is left at most."""
        if self.compiling is None:
            return
        job = self.compiling
        self.finish(job, self.left() / 4)
        self.compiling = None
        if job.status != 0:
            shutil.rmtree(self.built, ignore_errors=True)
            self.log.say("The C++ kernels were not compiled. gradclip runs without them.")

    def part(self, part, later):
        if part.compiled:
            self.compiled()
        seconds = limit(part, later, self.left())
        if seconds < 1:
            self.note(part.name, 0.0, "no time left")
            return
        words = (*part.command, *(part.rehearsal if self.rehearse else ()))
        # A program that ends by itself says more than one that is ended.
        command = [word.format(out=self.out, seconds=int(seconds * 0.9)) for word in words]
        self.finish(self.start(part.name, command, part.settings), seconds)

    def stop(self):
        if self.compiling is not None:
            self.compiling.stop()

    def table(self):
        width = max(len(name) for name, _, _ in self.done)
        return "\n".join(f"{name:{width}} {seconds:7.1f} s  {said(status)}" for name, seconds, status in self.done)


def said(status):
    return {0: "passed", 1: "failed"}.get(status, f"failed, {status}")


def pip(*arguments):
    settings = ["--disable-pip-version-check", "install", "--no-index", "--no-deps", "--no-compile"]
    return [PYTHON, "-m", "pip", *settings, *arguments]


def go(run, names, wheels, parts=PARTS):
    """Run the named parts in order; return whether all passed."""
    chosen = [part for part in parts if part.name in names]
    try:
        if WHEELS in names:
            run.install(wheels)
        if COMPILE in names:
            run.compile()
        for place, part in enumerate(chosen):
            run.part(part, chosen[place + 1 :])
        run.compiled()
    finally:
        run.stop()
    run.log.say(run.table())
    return all(status == 0 for _, _, status in run.done)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu" / "out", help="folder of the results")
    parser.add_argument("--seconds", type=float, default=540.0, help="the whole run ends within these")
    parser.add_argument("--wheels", type=Path, default=ROOT / "gpu-wheels", help="folder of wheels")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="PART", help=", ".join(NAMES))
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    given = parser.parse_args()
    # Python begins with this handler unless a shell started it in the background, and then no part would heed SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run = Run(given.out, given.seconds, rehearse=given.rehearse)
    sys.exit(0 if go(run, given.only, given.wheels) else 1)


if __name__ == "__main__":
    main()

"""The workflow for a public CI runs the commands of this repository: `.ci/run` on Linux, `make portable` elsewhere."""

import os
import re

import pytest
import yaml

from install_table import ROOT, project

WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
JOBS = WORKFLOW["jobs"]
CI_RUN = ROOT / ".ci" / "run"
TARGETS = set(re.findall(r"^([a-z-]+):(?!=)", (ROOT / "Makefile").read_text("utf-8"), re.M))
MAKE = re.compile(r"(?:^\s*|part |\")make ([\w-]+)", re.M)
APT = re.compile(r"(?:apt-get install|^ +packages|\|\| packages) ([^;\n$]+)", re.M)


def commands(job):
    return [step["run"] for step in JOBS[job]["steps"] if "run" in step]


def installed(text):
    """Return the packages that a script installs by apt-get."""
    return {word for line in APT.findall(text) for word in line.split() if word[0].isalnum()}


@pytest.mark.parametrize("job", JOBS)
def test_what_it_makes_is_a_target(job):
    named = MAKE.findall("\n".join([*commands(job), CI_RUN.read_text("utf-8") if job == "linux" else ""]))
    assert named
    assert set(named) <= TARGETS


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "RELEASING.md", "SECURITY.md"])
def test_what_pages_tell_to_make_is_a_target(page):
    named = re.findall(r"(?:^|`)make ([\w-]+)", (ROOT / page).read_text("utf-8"), re.M)
    assert named
    assert set(named) <= TARGETS


def test_linux_runs_everything():
    assert commands("linux")[-1] == ".ci/run"
    assert os.access(CI_RUN, os.X_OK)
    every = {"lint", "look", "wheel", "compilers", "demo", "every-test", "lucid", "proofs", "trainers"}
    assert every <= set(MAKE.findall(CI_RUN.read_text("utf-8")))


def test_linux_has_what_everything_needs():
    packages = installed("\n".join(commands("linux")))
    needed = installed(CI_RUN.read_text("utf-8"))
    assert {"chromium", "clang-14", "gappa", "z3"} <= needed
    assert needed | {"python3.11-dev", "python3.11-venv"} <= packages
    assert JOBS["linux"]["container"].startswith("python:3.12-")


def test_macos_and_windows_run_what_needs_no_kernels():
    systems = JOBS["portable"]["strategy"]["matrix"]["system"]
    assert {system.partition("-")[0] for system in systems} == {"macos", "windows"}
    assert commands("portable") == ["make portable PYTHON=python"]


def test_pythons_are_those_that_gradclip_declares():
    tried = JOBS["portable"]["strategy"]["matrix"]["python"]
    declared = re.findall(r"Python :: (3\.\d+)", "\n".join(project()["classifiers"]))
    assert tried == [declared[0], declared[-1]]


@pytest.mark.parametrize("job", JOBS)
def test_a_job_that_hangs_ends(job):
    assert 0 < JOBS[job]["timeout-minutes"] <= 90


def test_it_may_read_only():
    assert WORKFLOW["permissions"] == {"contents": "read"}

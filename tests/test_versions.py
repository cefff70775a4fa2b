"""What `gradclip info` tells of versions and kernels."""

import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from gradclip import NativeStatus
from gradclip._src import versions
from gradclip._src.cli.commands import app


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_info_names_versions():
    lines = dict(line.split(maxsplit=1) for line in run("info").output.splitlines())
    assert lines["python"] == ".".join(map(str, sys.version_info[:3]))
    assert lines["numpy"] == np.__version__
    assert {"gradclip", "torch", "jax", "tensorflow"} <= set(lines)


def test_tensorflow_has_two_names(monkeypatch):
    monkeypatch.setattr(versions, "_version", {"tensorflow-cpu": "2.21.0"}.get)
    assert versions.installed_versions()["tensorflow"] == "2.21.0"
    assert versions.installed_versions()["keras"] is None


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (NativeStatus(True, "avx2", ("baseline", "avx2"), None), "avx2"),
        (NativeStatus(False, None, (), "Not built."), "not available: Not built."),
    ],
)
def test_info_says_which_kernels_are_in_use(monkeypatch, status, text):
    monkeypatch.setattr(versions, "native_status", lambda: status)
    assert run("info").output.splitlines()[0].split(maxsplit=2) == ["native", "kernels", text]

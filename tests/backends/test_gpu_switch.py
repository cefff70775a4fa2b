"""Whether the kernels for GPUs are wanted and can run, without importing a framework."""

from importlib.metadata import PackageNotFoundError

import pytest

from fresh_process import run
from gradclip._src.backends import gpu_switch


@pytest.fixture(autouse=True)
def forgotten():
    gpu_switch.lacking.cache_clear()
    yield
    gpu_switch.lacking.cache_clear()


def installed(monkeypatch, release):
    def version(name):
        if release is None or name != "pytorch-triton":  # a name that it also has
            raise PackageNotFoundError(name)
        return release

    monkeypatch.setattr(gpu_switch, "version", version)


@pytest.mark.parametrize(
    ("setting", "wanted"), [("1", True), ("on", True), ("0", False), ("", False), ("False", False), (" off ", False)]
)
def test_the_variable_switches_them(monkeypatch, setting, wanted):
    monkeypatch.setenv("GRADCLIP_GPU_KERNELS", setting)
    assert gpu_switch.wanted() is wanted
    assert gpu_switch.status_text().startswith(f"off by GRADCLIP_GPU_KERNELS={setting}") is not wanted


@pytest.mark.parametrize("default", [True, False])
def test_they_are_on_where_the_device_is_known(monkeypatch, default):
    monkeypatch.delenv("GRADCLIP_GPU_KERNELS", raising=False)
    assert gpu_switch.wanted(default) is default
    assert gpu_switch.wanted() is True


@pytest.mark.parametrize(
    ("release", "text"),
    [
        (None, "off: Triton is not installed"),
        ("3.3.1", "off: Triton 3.3.1 is too old, 3.4 is needed"),
        ("3.4.0", "on, by Triton 3.4.0"),
        ("3.10.0+git1234", "on, by Triton 3.10.0+git1234"),
    ],
)
def test_it_says_what_is_lacking(monkeypatch, release, text):
    monkeypatch.setenv("GRADCLIP_GPU_KERNELS", "1")
    installed(monkeypatch, release)
    assert gpu_switch.status_text() == text


def test_asking_imports_no_framework(tmp_path):
    code = """
        import sys
        from gradclip._src.versions import info_text
        assert "gpu kernels        on, by Triton" in info_text(), info_text()
        print(sorted({"torch", "triton", "jax", "tensorflow"} & sys.modules.keys()))
    """
    assert run(code, tmp_path, GRADCLIP_GPU_KERNELS="1") == "[]"

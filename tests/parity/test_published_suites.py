"""The tests that ship inside the libraries, run with gradclip's functions in the place of the libraries' own.

The set of tests that fail is asserted as it is, so that neither a new failure nor one that went away passes unseen.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

# A second look: tests/parity/test_parity_table.py compares the same functions.
pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Suite:
    """The test files of a distribution, which of their tests concern clipping, and what is known of them."""

    distribution: str
    files: tuple[str, ...]
    select: str
    passing: int
    replaced: tuple[str, ...]
    # Fail whatever function the library uses, once its thresholds are half as large again.
    sensitive: str
    failing: frozenset[str] = frozenset()


SUITES = {
    "optax": Suite(
        "optax",
        ("optax/transforms/_clipping_test.py", "optax/contrib/_privacy_test.py"),
        "test_clip or test_adaptive or per_example or no_privacy",
        passing=13,
        replaced=(
            "adaptive_grad_clip",
            "clip",
            "clip_by_block_rms",
            "clip_by_global_norm",
            "per_example_global_norm_clip",
            "per_example_layer_norm_clip",
        ),
        sensitive="ClippingTest and (test_clip or test_adaptive or per_example)",
        failing=frozenset(
            {
                # Wants a block's RMS to 7 decimal places; float32 is multiplied by a coefficient lowered by 2**-23.
                "optax/transforms/_clipping_test.py::ClippingTest::test_clip_by_block_rms",
            }
        ),
    ),
    "jax_privacy": Suite(
        "jax-privacy",
        ("tests/clipping_test.py", "tests/gradient_clipping_test.py"),
        "ClipPyTree or sensitivity or float16 or rescale or padding or metrics",
        passing=165,
        replaced=("clip_pytree",),
        sensitive="sum_clipped_grad_basic or sum_clipped_grad_with_padding",
        failing=frozenset(
            {
                # Wants a norm of 1 to 7 decimal places; that of gradclip is at most 1, here 1 - 2**-24.
                "tests/clipping_test.py::ClipPyTreeTest::test_clip_pytree_clip_norm_zero_rescale",
                # Want float16 and bfloat16 sums to 6 decimal places; those of gradclip are rounded toward zero.
                "tests/gradient_clipping_test.py::GradientClippingTest::test_sum_clipped_grad_float160",
                "tests/gradient_clipping_test.py::GradientClippingTest::test_sum_clipped_grad_float161",
            }
        ),
    ),
    "jax_privacy sums": Suite(
        "jax-privacy",
        ("tests/clipping_test.py", "tests/gradient_clipping_test.py", "tests/experimental/execution_plan_test.py"),
        "ClipTransform or GradientClipping or (plan_creation and not raises)",
        passing=46,
        replaced=("clipped_fun", "clipped_grad"),
        sensitive="sum_clipped_grad_basic or sum_clipped_grad_with or leaf_scales",
        failing=frozenset(
            {
                # Look for other words in a ValueError; that of gradclip names the argument, or lists all shapes.
                "tests/gradient_clipping_test.py::GradientClippingTest::test_validate_args_empty_batch",
                "tests/gradient_clipping_test.py::GradientClippingTest::test_validate_args_inconsistent_batch_size",
            }
        ),
    ),
    "brainstate": Suite(
        "brainstate",
        ("brainstate/nn/_utils_test.py",),
        "ClipGradNorm",
        passing=29,
        replaced=("clip_grad_norm",),
        sensitive="test_simple_dict_clipping or test_nested_structure_clipping or test_max_norm_as_array",
    ),
}
RIGHT, WRONG = "1", "1.5"


def session(library, stretch, report):
    """Return how a library's own tests are run once: what the plugin is told, and what pytest is told."""
    suite = SUITES[library]
    root = Path(importlib.metadata.distribution(suite.distribution).locate_file("")).resolve()
    settings = {
        "GRADCLIP_SWAP": library,
        "GRADCLIP_SWAP_REPORT": str(report),
        "GRADCLIP_SWAP_STRETCH": stretch,
    }
    select = suite.select if stretch == RIGHT else suite.sensitive
    options = ["-p", "swap_plugin", "-p", "no:cacheprovider", "-W", "ignore", "--import-mode=importlib", "-k", select]
    places = ["-c", report.parent / "pytest.ini", "--rootdir", root, *(root / file for file in suite.files)]
    return settings, [*options, *map(str, places)]


def run_suites(distribution, folder):
    """Run a distribution's own tests in one process; return the plugin's report of each run, and what is printed."""
    reports = {
        (library, stretch): folder / f"{library} {stretch}.json"
        for library, suite in SUITES.items()
        for stretch in (RIGHT, WRONG)
        if suite.distribution == distribution
    }
    (folder / "pytest.ini").write_text("[pytest]\n")
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    finished = subprocess.run(
        [sys.executable, "-m", "swap_sessions"],
        input=json.dumps([session(*key, report) for key, report in reports.items()]),
        env=os.environ | {"PYTHONPATH": path, "PYTEST_ADDOPTS": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return {key: json.loads(report.read_text()) for key, report in reports.items()}, finished.stdout


@pytest.mark.parametrize("distribution", sorted({suite.distribution for suite in SUITES.values()}))
def test_published_suites_pass_and_notice_a_wrong_replacement(distribution, tmp_path):
    reports, output = run_suites(distribution, tmp_path)
    for (library, stretch), outcome in reports.items():
        suite = SUITES[library]
        assert tuple(outcome["replaced"]) == suite.replaced
        assert all(outcome["replaced"].values())
        if stretch == WRONG:
            assert outcome["passed"] == [], output
            assert outcome["failed"]
        else:
            assert set(outcome["failed"]) == suite.failing, output
            assert len(outcome["passed"]) == suite.passing

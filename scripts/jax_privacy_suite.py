"""Run jax-privacy's own tests of a checkout with gradclip's functions in place of its own, and the page on DPTrainer.

    python scripts/jax_privacy_suite.py CHECKOUT [--path FOLDER ...]

`--path` names folders that Python should look in first, such as checkouts of the optax and dp-accounting that the main
branch of jax-privacy is developed with. Exit status 1 means that other tests fail than those listed here.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests" / "support"))

import code_blocks  # noqa: E402

PAGE = ROOT / "docs" / "migrate" / "jax-privacy.md"
FILES = ("clipping_test", "gradient_clipping_test", "execution_plan_test", "optimizers_test", "training_test")
REASONS = {
    "test_clip_pytree_clip_norm_zero_rescale": "wants a norm of 1 to 7 places; ours is at most 1, here 1 - 3 * 2**-24",
    "test_validate_args_empty_batch": "wants other words: 'Batch Argnums', where the argument is batch_argnums",
}


def outcome_of(checkout, paths):
    """Run the tests in a process of their own; return what the plugin reports, and the output."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        first = [checkout, *paths, ROOT / "tests" / "parity", ROOT / "src"]
        settings = {
            "GRADCLIP_SWAP": "jax_privacy newest",
            "GRADCLIP_SWAP_REPORT": str(report),
            "PYTHONPATH": os.pathsep.join(map(str, first)),
        }
        options = ["-q", "-p", "swap_plugin", "-p", "no:cacheprovider", "-W", "ignore", "--import-mode=importlib"]
        places = ["-c", os.devnull, "--rootdir", checkout, *(checkout / "tests" / f"{name}.py" for name in FILES)]
        finished = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *places],
            env=os.environ | settings,
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        output = finished.stdout + finished.stderr
        if finished.returncode not in (0, 1):
            raise SystemExit(f"the tests did not run:\n{output}")
        return json.loads(report.read_text()), output


def page_is_right(paths):
    """Run the file on the page, and say whether it prints what stands below it."""
    (block,) = (block for block in code_blocks.blocks(PAGE.read_text()) if block.kind == 'python title="train.py"')
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT / "src"]))}
    done = subprocess.run(
        [sys.executable, "-c", block.code], env=environment, capture_output=True, text=True, check=False
    )
    right = done.stdout == block.below
    print(f"{PAGE.relative_to(ROOT)}: {'prints what it says' if right else done.stdout + done.stderr}")
    return right


def file_of(name):
    return Path(name.partition("::")[0]).stem


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=lambda given: Path(given).resolve())
    parser.add_argument("--path", nargs="+", default=[], type=lambda given: Path(given).resolve())
    options = parser.parse_args()
    outcome, output = outcome_of(options.checkout, options.path)
    assert all(outcome["replaced"].values()), outcome["replaced"]
    passed, failed = (Counter(map(file_of, outcome[kind])) for kind in ("passed", "failed"))
    for name in FILES:
        print(f"{name}: {passed[name]} of {passed[name] + failed[name]}")
    unknown = False
    for name in outcome["failed"]:
        reason = REASONS.get(name.rpartition("::")[2])
        unknown |= reason is None
        print(f"  {name.rpartition('::')[2]}: {reason or 'NOT KNOWN'}")
    if unknown:
        print(output)
    right = page_is_right([options.checkout, *options.path])
    sys.exit(unknown or not right)


if __name__ == "__main__":
    main()

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
EXPECTED = {
    "torch_training.py": [
        "Learning to add 15 numbers, max_norm 1, on ",
        "step   1: loss ",
        "step 200: loss ",
        " before clipping, 1.00 after\n",
        " of 200 steps\n",
    ],
    "torch_grad_scaler.py": [
        "step 1: scale 65536, loss ",
        "gradient norm inf, skipped, scale halved\nstep 2: scale 32768, loss ",
        ", taken\nstep 8: scale 32768, loss ",
        "1 of 8 steps skipped; parameters all finite\n",
    ],
    "torch_ddp_amp.py": [
        "step  1: norm 3.",
        "clipped 1\nstep  2: norm ",
        "step 30: norm nan, clipped 0\n",
        "Monitor(60 steps, ",
        " clipped, 0 skipped, 1 not finite); the scale is 32768\n",
        "last norm equal on 2 processes: True; parameters finite: True\n",
    ],
    "torch_private.py": ["20 epochs, noise multiplier 2, delta 0.0001\n", "ordinary  epsilon   inf, ", "\nOpacus "],
    "jax_nnx.py": [
        "step   1: loss ",
        ", times 0.0",
        "step 200: loss ",
        ", times 1.000\nclipped to norm 1 in ",
        "\nthe largest median norms of layers:\n  out.kernel.value: 0.",
    ],
    "jax_libraries.py": [
        "60 steps, each gradient clipped to norm 1, noise multiplier 0.5\nFlax NNX: loss ",
        "; noise 0.50000\nEquinox: loss ",
        "; noise 0.50000\nHaiku: loss ",
        "; noise 0.50000\n",
    ],
    "federated_files.py": [
        "anna.npz: accepted. The norm 0.999",
        "boris.safetensors: accepted. The norm 0.999",
        ", and the names, shapes and dtypes of its 4 arrays are those of the template.\n",
        "carol.npz: REFUSED. The norm 1.00000061 is larger than 1 by 6.11e-07; norm**2 lies 96.2% in ['encoder.w'], ",
        "nancy.npz: REFUSED. ['head.b'] holds 10 NaN and 0 infinite of its 10 numbers.\n",
        "oscar.safetensors: REFUSED. ['head.b'] is missing.\n",
        "mean of the 2 accepted updates: norm 0.7041\nwith 1 more that the server clipped: norm 0.5730\n",
    ],
    "jax_optax.py": ["step   1: loss ", "step 200: loss ", "\nclipped to norm 1 in "],
    "jax_two_processes.py": [
        "2 processes, 2 devices; whole arrays gathered: False\n",
        "step   1: loss ",
        "step 100: loss ",
        "; parameters still sharded: True\n",
    ],
    "jax_private_sum.py": [
        " nan ",
        " 0.00 0.00\n",
        "3 of 6 examples had a norm above max_norm 1\n",
        "equal to the sum without the NaN example and the padding, bit for bit: yes\n",
        "No noise has been added: this sum is bounded in each example, not private.\n",
    ],
    "dp_sgd_torch.py": [
        "for 224 examples at a time\nparameter ",
        " ghost ",
        " times less work\n",
        "gradclip: sum over examples, add or remove one example: at most 1.0 (+ 4.2e-05 rounding); "
        "batches padded to 223 examples that keep their places, where mask= removes one; noise 2.0000834",
        "40 steps, delta 0.0001, noise multiplier 2\n",
        " epsilon  accuracy  ms/step\ngradclip ",
        "\nOpacus ",
        "\nnot private       inf ",
    ],
    "dp_sgd_jax.py": [
        "for 224 examples at a time\nparameter ",
        " ghost ",
        " times less work\n",
        "gradclip: sum over examples, add or remove one example: at most 1.0 (+ 4.2e-05 rounding); "
        "batches padded to 223 examples that keep their places, where mask= removes one; noise 2.0000834",
        "40 steps, delta 0.0001, noise multiplier 2\n",
        " epsilon  accuracy  ms/step\ngradclip ",
        "\njax_privacy ",
        "\nnot private       inf ",
    ],
    **{
        f"private_cnn_{framework}.py": [
            "3130 parameters, 8 steps, 1 seeds, delta 0.0001\n"
            "epsilon 8 at delta 0.0001, add or remove one example: 8 of 8 sums released\n"
            "1440 examples, rate 0.25, at most ",
            "\nnoise multiplier 0.7",
            ", sensitivity 1.005",
            "\nnot proven: a gradient depends on its own example only, and dp-accounting computes what it says\n",
            "last steps, from noisy sums: loss ",
            "\ngradclip    epsilon 8.000, ",
            " ms/step, of which exact noise ",
            f"\n{peer} epsilon ",
        ]
        for framework, peer in (("torch", "Opacus     "), ("jax", "jax_privacy"))
    },
    "private_federated.py": [
        "epsilon 1.999 at delta 1e-05, add or remove one group: 30 of 30 sums released\n2000 groups, rate 0.1, ",
        "\nnot proven: a gradient depends on its own group only, and dp-accounting computes what it says\n",
        "30 rounds of about 200 clients: epsilon 2.00 for a whole client\nlargest error of a parameter: 0.",
    ],
    "sharded_checkpoint.py": [
        "4 files, norm 723.8",
        ", known from 6 numbers a file\nclipped file by file: norm 0.99",
        ", at most 1.0; of all in memory 0.99",
    ],
    "fsdp2.py": [
        "step  1: loss ",
        " before clipping, 1.00 after\nstep 20",
        "step 60: loss ",
        " steps on 2 processes\n",
    ],
    "fsdp_tp.py": ["step  1: loss ", ", equal on 4 processes\nstep 10", "step 30: loss ", ", equal on 4 processes\n"],
    "pipeline.py": ["step  1: loss ", ", of the second stage alone ", "step 40: loss "],
    "numpy_federated.py": [
        "update of norm 8.7188, dtypes float16 and float32, clipped to 1.0\n",
        "  gradclip: exact norm 0.999",
        ", at most 1.0\n  usual formula: exact norm 1.0000",
        ", ABOVE 1.0\nlayer by layer, weight and bias together:\n",
        "  encoder, norm 6.7948 before: exact norm 0.799",
        ", at most 0.8\n  head, norm 5.4633 before: exact norm 0.49999",
        ", at most 0.5\nof 1000 random updates, results with a norm above 1.0: gradclip 0, usual formula ",
    ],
}
# Those that train for long, or in several processes.
LONG = (
    "torch_ddp_amp.py",
    "torch_private.py",
    "jax_nnx.py",
    "jax_libraries.py",
    "jax_two_processes.py",
    "dp_sgd_torch.py",
    "dp_sgd_jax.py",
    "private_cnn_torch.py",
    "private_cnn_jax.py",
    "private_federated.py",
    "fsdp2.py",
    "fsdp_tp.py",
    "pipeline.py",
)
ON_THIS_MACHINE = {"GLOO_SOCKET_IFNAME": "lo"}
PROCESSES = {"torch_ddp_amp.py": 2, "fsdp2.py": 2, "fsdp_tp.py": 4, "pipeline.py": 2}
SHORT = ["--steps", "8", "--seeds", "1", "--epsilons", "8"]
ARGUMENTS = {
    "dp_sgd_torch.py": ["--steps", "40"],
    "dp_sgd_jax.py": ["--steps", "40"],
    "private_cnn_torch.py": SHORT,
    "private_cnn_jax.py": SHORT,
}
# Warnings of the libraries that the examples are run beside.
PASSED_OVER = (
    "-Wignore:Full backward hook is firing:UserWarning",
    "-Wignore:Secure RNG turned off:UserWarning",
    "-Wignore:Optimal order is the largest alpha:UserWarning",
    "-Wignore:optax.global_norm is deprecated:DeprecationWarning",
)


@cache
def output_of(name):
    """Run an example in a process of its own, with warnings as errors; return what it printed."""
    process = subprocess.Popen(
        [sys.executable, *started_by(name), str(EXAMPLES / name), *ARGUMENTS.get(name, [])],
        env=os.environ | {"PYTHONIOENCODING": "utf-8", "OMP_NUM_THREADS": "1"} | ON_THIS_MACHINE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        printed, errors = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()  # which ends those that it has started, too
        process.communicate(timeout=60)
        raise
    assert process.returncode == 0, errors
    return printed


def started_by(name):
    """Return the options that run an example with warnings as errors, or in several processes."""
    if name in PROCESSES:
        return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES[name])]
    return ["-Werror", *PASSED_OVER]


def cases(names, *cases):
    """Return a mark that runs a test for each case, which has the name of an example first; the long ones seldom."""
    params = [pytest.param(*case, marks=pytest.mark.slow if case[0] in LONG else ()) for case in cases]
    return pytest.mark.parametrize(names, params)


def numbers(pattern, name):
    return [float(found) for found in re.findall(pattern, output_of(name))]


@cases("name", *((name,) for name in EXPECTED))
def test_an_example_prints_what_happened(name):
    printed = output_of(name)
    # In this order, so that a part that occurs twice is looked for behind the one before it.
    rest = printed
    for part in EXPECTED[name]:
        _, found, rest = rest.partition(part)
        assert found, f"{part!r} is missing, or out of order, in:\n{printed}"


def test_every_example_is_run_and_listed():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == set(EXPECTED)
    assert scripts == set(re.findall(r"\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))


@cases(
    ("name", "factor"),
    ("torch_training.py", 3),
    ("torch_grad_scaler.py", 1.3),
    ("torch_ddp_amp.py", 20),
    ("jax_optax.py", 9),
    ("jax_nnx.py", 20),
    ("fsdp2.py", 1.8),
    ("fsdp_tp.py", 1.8),
    ("pipeline.py", 1.8),
)
def test_training_lowers_the_loss(name, factor):
    losses = numbers(r"loss ([\d.]+)", name)
    assert losses[-1] < losses[0] / factor


@cases("name", ("jax_libraries.py",))
def test_private_training_lowers_every_loss(name):
    losses = numbers(r"(?:loss|then) ([\d.]+)", name)
    assert len(losses) == 6
    assert all(last < first / 20 for first, last in zip(losses[::2], losses[1::2], strict=True))
    assert all(5 < share < 95 for share in numbers(r"(\d+)% of the gradients", name))


@cases("name", ("torch_training.py",), ("jax_optax.py",), ("jax_nnx.py",))
def test_some_steps_are_clipped_and_some_are_not(name):
    (clipped,) = numbers(r"clipped .*in (\d+) of 200 steps", name)
    assert 10 < clipped < 190


def test_the_usual_formula_exceeds_the_threshold_in_about_half_of_the_updates():
    (above,) = numbers(r"usual formula (\d+)$", "numpy_federated.py")
    assert 300 < above < 700


@cases(("name", "peer"), ("dp_sgd_torch.py", "Opacus"), ("dp_sgd_jax.py", "jax_privacy"))
def test_private_training_learns_within_its_epsilon(name, peer):
    rows = {row[0]: row[1:] for row in map(str.split, output_of(name).splitlines()) if row[0] in ("gradclip", peer)}
    for epsilon, accuracy, milliseconds in rows.values():
        # 40 steps that take a tenth of the examples each, with noise of two sensitivities.
        assert 1.2 < float(epsilon) < 1.8
        assert float(accuracy.removesuffix("%")) > 55
        assert float(milliseconds) > 0
    assert set(rows) == {"gradclip", peer}


@cases(("name", "peer"), ("private_cnn_torch.py", "Opacus"), ("private_cnn_jax.py", "jax_privacy"))
def test_a_model_that_may_be_released_keeps_its_epsilon_and_learns(name, peer):
    found = re.findall(
        r"^(\w+) +epsilon (\S+), test accuracy (\S+)% ± 0.0%, \S+ ms/step", output_of(name), re.MULTILINE
    )
    assert [each for each, _, _ in found] == ["gradclip", peer]
    for _, epsilon, accuracy in found:
        assert 7.9 < float(epsilon) <= 8
        assert float(accuracy) > 30  # of ten digits, after 8 steps


@pytest.mark.slow
def test_federated_rounds_find_the_model_from_noisy_sums():
    (error,) = numbers(r"largest error of a parameter: ([\d.]+)", "private_federated.py")
    assert error < 0.1


@pytest.mark.slow
def test_an_ordinary_loop_made_private_is_as_good_as_by_opacus():
    found = re.findall(r"^(\w+) +epsilon +(\S+), accuracy (\S+)%$", output_of("torch_private.py"), re.MULTILINE)
    epsilon = {name: float(spent) for name, spent, _ in found}
    accuracy = {name: float(right) for name, _, right in found}
    # Two accountants of the same 200 steps, each with a tenth of the examples: theirs adds what it may be off by, 0.01.
    assert 2.86 < epsilon["gradclip"] < 2.88
    assert epsilon["Opacus"] == pytest.approx(epsilon["gradclip"], abs=0.02)
    assert accuracy["gradclip"] > 82
    assert accuracy["gradclip"] > accuracy["Opacus"] - 4
    assert accuracy["ordinary"] > accuracy["gradclip"]


@pytest.mark.parametrize("name", ["torch_ddp_amp.py", "torch_private.py", "jax_nnx.py", "federated_files.py"])
def test_recipes_are_short(name):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 120

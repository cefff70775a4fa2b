"""Each example is run once, and does what its page says.

Those that train by PyTorch run with a guard of each of their optimizers, which must find no mistake.
"""

import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import TCPStore

import processes

EXAMPLES = Path(__file__).parents[1] / "examples"
GUARDED = Path(__file__).parent / "support" / "guarded.py"
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
    "private_mesh_jax.py": [
        "all with the same parameters: True",
        "error below 0.5: True; epsilon 2.26",
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
    "private_two_processes.py": [
        "epsilon 2.999 at delta 1e-05, add or remove one example: 20 of 20 sums released\n2000 examples, rate 0.2, ",
        "\nnot proven: a gradient depends on its own example only, and dp-accounting computes what it says\n",
        "; equal on 2 processes: True\n",
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
    "private_two_processes.py",
    "fsdp2.py",
    "fsdp_tp.py",
    "pipeline.py",
)
PROCESSES = {
    "torch_ddp_amp.py": 2,
    "private_two_processes.py": 2,
    "fsdp2.py": 2,
    "fsdp_tp.py": 4,
    "pipeline.py": 2,
}
# This one by the command that its page names. The others in forks, given what that command gives them.
BY_COMMAND = "torch_ddp_amp.py"
SHORT = ["--steps", "8", "--seeds", "1", "--epsilons", "8"]
ARGUMENTS = {
    "dp_sgd_torch.py": ["--steps", "40"],
    "dp_sgd_jax.py": ["--steps", "40"],
    "private_cnn_torch.py": SHORT,
    "private_cnn_jax.py": SHORT,
}
# Those that train with an optimizer of PyTorch. Private sums bound each example, not the norm at a step.
GUARDED_NORMS = {
    path.name: "inf" if "private" in path.name or path.name.startswith("dp_") else "1.0"
    for path in EXAMPLES.glob("*.py")
    if "torch.optim" in path.read_text(encoding="utf-8")
}
# Warnings of the libraries that the examples are run beside.
PASSED_OVER = (
    "-Wignore:Full backward hook is firing:UserWarning",
    "-Wignore:Secure RNG turned off:UserWarning",
    "-Wignore:Optimal order is the largest alpha:UserWarning",
    "-Wignore:optax.global_norm is deprecated:DeprecationWarning",
)


def output_of(name):
    """Run an example, in as many processes as it needs; return what they printed."""
    if name in PROCESSES and name != BY_COMMAND:
        return in_forks(PROCESSES[name], started(name))
    options = ["-Werror", *PASSED_OVER]
    if name == BY_COMMAND:
        options = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES[name])]
    return in_a_process_of_its_own([*options, *started(name)])


def started(name):
    """Return the script that is started, and its arguments."""
    guard = [str(GUARDED), GUARDED_NORMS[name]] if name in GUARDED_NORMS else []
    return [*guard, str(EXAMPLES / name), *ARGUMENTS.get(name, [])]


def in_a_process_of_its_own(arguments):
    """Run Python with these arguments. No process that it starts is left over."""
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONIOENCODING": "utf-8"} | processes.ON_THIS_MACHINE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, errors = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.terminate()  # which ends those that it has started, too
        process.communicate(timeout=60)
        raise
    assert process.returncode == 0, errors
    assert has_ended(process.pid)
    return printed


def has_ended(group, seconds=30):
    """Say whether nothing of a process group is left over, which may take a while to end behind the first process."""
    end = time.monotonic() + seconds
    while processes.runs(group) and time.monotonic() < end:
        time.sleep(0.05)
    return not processes.runs(group)


def in_forks(world, command):
    """Run a script in forks of a process that has imported PyTorch, which find each other as those of `torchrun`."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    there = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    ended = processes.run(world, *command, timeout=240, settings=there | agent)
    assert not any(one.status for one in ended), "\n".join(one.errors for one in ended)
    return "".join(one.output for one in ended)


@pytest.fixture(autouse=True, scope="module")
def end_the_process_that_is_forked():
    yield
    processes.end()


def each_example():
    """Return a mark that runs a test for each example; the long ones seldom."""
    params = [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in EXPECTED]
    return pytest.mark.parametrize("name", params)


@each_example()
def test_an_example_prints_what_happened(name):
    printed = output_of(name)
    # In this order, so that a part that occurs twice is looked for behind the one before it.
    rest = printed
    for part in EXPECTED[name]:
        _, found, rest = rest.partition(part)
        assert found, f"{part!r} is missing, or out of order, in:\n{printed}"
    if name in FACTORS:
        the_loss_falls(printed, FACTORS[name])
    if name in GUARDED_NORMS:
        each_guard_has_looked(printed, PROCESSES.get(name, 1))
    if name in CHECKS:
        CHECKS[name](printed)


def test_every_example_is_run_and_listed():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == set(EXPECTED)
    assert scripts == set(re.findall(r"\((\w+\.py)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))


def test_these_examples_are_guarded():
    assert set(PROCESSES) | {"torch_training.py", "torch_grad_scaler.py", "torch_private.py"} <= set(GUARDED_NORMS)


def numbers(pattern, printed):
    return [float(found) for found in re.findall(pattern, printed)]


def each_guard_has_looked(printed, world):
    looks = numbers(r"guards looked (\d+) times", printed)
    assert len(looks) == world
    assert min(looks) >= 3


# By how much the loss falls at least.
FACTORS = {
    "torch_training.py": 3,
    "torch_grad_scaler.py": 1.3,
    "torch_ddp_amp.py": 20,
    "jax_optax.py": 9,
    "jax_nnx.py": 20,
    "jax_two_processes.py": 2,
    "fsdp2.py": 1.8,
    "fsdp_tp.py": 1.8,
    "pipeline.py": 1.8,
}


def the_loss_falls(printed, factor):
    losses = numbers(r"loss +([\d.]+)", printed)
    assert losses[-1] < losses[0] / factor


def some_steps_are_clipped_and_some_are_not(printed):
    (clipped,) = numbers(r"clipped .*in (\d+) of 200 steps", printed)
    assert 10 < clipped < 190


def private_training_lowers_every_loss(printed):
    losses = numbers(r"(?:loss|then) ([\d.]+)", printed)
    assert len(losses) == 6
    assert all(last < first / 20 for first, last in zip(losses[::2], losses[1::2], strict=True))
    assert all(5 < share < 95 for share in numbers(r"(\d+)% of the gradients", printed))


def the_norm_is_that_of_one_process(printed):
    norm, expected = re.search(r"step   1: .* norm (\S+), in one process (\S+)", printed).groups()
    assert norm == expected


def the_usual_formula_exceeds_the_threshold_in_about_half_of_the_updates(printed):
    (above,) = numbers(r"usual formula (\d+)$", printed)
    assert 300 < above < 700


def private_training_learns_within_its_epsilon(printed, peer):
    rows = {row[0]: row[1:] for row in map(str.split, printed.splitlines()) if row and row[0] in ("gradclip", peer)}
    for epsilon, accuracy, milliseconds in rows.values():
        # 40 steps that take a tenth of the examples each, with noise of two sensitivities.
        assert 1.2 < float(epsilon) < 1.8
        assert float(accuracy.removesuffix("%")) > 55
        assert float(milliseconds) > 0
    assert set(rows) == {"gradclip", peer}


def a_model_that_may_be_released_keeps_its_epsilon_and_learns(printed, peer):
    found = re.findall(r"^(\w+) +epsilon (\S+), test accuracy (\S+)% ± 0.0%, \S+ ms/step", printed, re.MULTILINE)
    assert [each for each, _, _ in found] == ["gradclip", peer]
    for _, epsilon, accuracy in found:
        assert 7.9 < float(epsilon) <= 8
        assert float(accuracy) > 30  # of ten digits, after 8 steps


def federated_rounds_find_the_model_from_noisy_sums(printed):
    (error,) = numbers(r"largest error of a parameter: ([\d.]+)", printed)
    assert error < 0.1


def an_ordinary_loop_made_private_is_as_good_as_by_opacus(printed):
    found = re.findall(r"^(\w+) +epsilon +(\S+), accuracy (\S+)%$", printed, re.MULTILINE)
    epsilon = {name: float(spent) for name, spent, _ in found}
    accuracy = {name: float(right) for name, _, right in found}
    # Two accountants of the same 200 steps, each with a tenth of the examples: theirs adds what it may be off by, 0.01.
    assert 2.86 < epsilon["gradclip"] < 2.88
    assert epsilon["Opacus"] == pytest.approx(epsilon["gradclip"], abs=0.02)
    assert accuracy["gradclip"] > 82
    assert accuracy["gradclip"] > accuracy["Opacus"] - 4
    assert accuracy["ordinary"] > accuracy["gradclip"]


CHECKS = {
    "torch_training.py": some_steps_are_clipped_and_some_are_not,
    "jax_optax.py": some_steps_are_clipped_and_some_are_not,
    "jax_nnx.py": some_steps_are_clipped_and_some_are_not,
    "jax_libraries.py": private_training_lowers_every_loss,
    "jax_two_processes.py": the_norm_is_that_of_one_process,
    "numpy_federated.py": the_usual_formula_exceeds_the_threshold_in_about_half_of_the_updates,
    "dp_sgd_torch.py": partial(private_training_learns_within_its_epsilon, peer="Opacus"),
    "dp_sgd_jax.py": partial(private_training_learns_within_its_epsilon, peer="jax_privacy"),
    "private_cnn_torch.py": partial(a_model_that_may_be_released_keeps_its_epsilon_and_learns, peer="Opacus"),
    "private_cnn_jax.py": partial(a_model_that_may_be_released_keeps_its_epsilon_and_learns, peer="jax_privacy"),
    "private_federated.py": federated_rounds_find_the_model_from_noisy_sums,
    "torch_private.py": an_ordinary_loop_made_private_is_as_good_as_by_opacus,
}


@pytest.mark.parametrize("name", ["torch_ddp_amp.py", "torch_private.py", "jax_nnx.py", "federated_files.py"])
def test_recipes_are_short(name):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < 120

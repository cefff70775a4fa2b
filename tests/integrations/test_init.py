import importlib
import subprocess
import sys

import pytest

NEEDED = {
    "brainstate": "jax",
    "declearn": "declearn",
    "flower": "flwr",
    "jax_privacy": "jax",
    "keras": "keras",
    "opacus": "opacus",
    "optax": "optax",
    "torch": "torch",
}
# What the library has no function for.
NEW = {
    "jax_privacy": {"clip_and_round_to_grid", "with_gradclip"},
    "optax": {
        "AdaptiveClipState",
        "LayerClipState",
        "NormState",
        "SkipSpikesState",
        "adaptive_clip_by_global_norm",
        "adaptive_clip_by_layer_norm",
        "clip_by_global_norm_with_state",
        "skip_spikes",
    },
    "torch": {"MaskedDataset", "PoissonSampler", "clip_in_backward", "poisson_loader"},
}


@pytest.mark.parametrize(("integration", "missing"), NEEDED.items())
def test_a_missing_library_says_what_to_install(integration, missing):
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        f"try: import gradclip.integrations.{integration}\n"
        "except ModuleNotFoundError as error: print(error.name, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, _, message = done.stdout.strip().partition(" ")
    assert name.partition(".")[0] == missing
    expected = (
        f"gradclip.integrations.{integration} needs {missing}, which is not installed. Run: pip install {missing}"
    )
    assert message == expected


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_integrations_are_there_without_an_import_statement():
    code = "import gradclip, sys; before = 'torch' in sys.modules; name = gradclip.integrations.torch.clip_grad_norm_"
    code = f"{code}.__module__; print(before, name, dir(gradclip.integrations))"
    assert run(code) == "False gradclip.integrations.torch ['torch']"


def test_an_integration_without_its_library_says_what_to_install():
    code = "import sys, gradclip; sys.modules['flwr'] = None\n"
    code += "try: gradclip.integrations.flower\nexcept AttributeError as error: print(error)\n"
    code += "print(hasattr(gradclip.integrations, 'flower'))"
    message = "gradclip.integrations.flower needs flwr, which is not installed. Run: pip install flwr"
    assert run(code) == f"{message}\nFalse"


def test_looking_at_integrations_imports_none():
    code = "import gradclip, pydoc, sys; dir(gradclip.integrations), dir(gradclip)\n"
    code += "text = pydoc.plain(pydoc.render_doc(gradclip.integrations))\n"
    code += "print({'jax', 'keras', 'optax', 'tensorflow', 'torch'} & set(sys.modules))\n"
    code += "print(text[text.index('PACKAGE CONTENTS'):text.index('FILE')])"
    told = run(code).split()
    assert told[0] == "set()"
    assert {"jax_privacy", "keras", "optax", "tensorflow", "torch"} < set(told)


@pytest.mark.parametrize(
    ("integration", "library"),
    [
        ("brainstate", "brainstate.nn"),
        ("declearn", "declearn.optimizer.modules"),
        ("jax_privacy", "jax_privacy.clipping"),
        ("optax", "optax"),
        ("torch", "torch.nn.utils"),
    ],
)
def test_what_is_exported_is_what_the_library_has(integration, library):
    exported = importlib.import_module(f"gradclip.integrations.{integration}").__all__
    replaced = importlib.import_module(library)
    assert {name for name in exported if not hasattr(replaced, name)} == NEW.get(integration, set())

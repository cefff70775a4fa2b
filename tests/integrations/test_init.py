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
        "NormState",
        "SkipSpikesState",
        "adaptive_clip_by_global_norm",
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


def test_a_missing_module_of_our_own_is_no_missing_library():
    from gradclip.integrations import needed_for

    with pytest.raises(ModuleNotFoundError, match="No module named 'gradclip\\.nowhere'"), needed_for("torch"):
        import gradclip.nowhere  # noqa: F401


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

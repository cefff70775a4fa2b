"""Users see public paths alone: in objects, pickles, saved states, texts, help and pages."""

import ast
import copy
import importlib
import inspect
import json
import pickle
import pickletools
import pydoc
import re
from pathlib import Path
from pkgutil import iter_modules

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import gradclip
import gradclip.typing
from engines_alike import Engine
from gradclip import integrations

ROOT = Path(__file__).parents[1]
# Those whose libraries leave the process as it is.
INSTALLED = ("brainstate", "jax_privacy", "lucid", "opacus", "optax", "tensorflow", "torch")
# A folder of the source, or a file that is not public.
INTERNAL = re.compile(
    r"gradclip[./]_src|gradclip[./]integrations[./]_|\b(?:core|monitor|private|thresholds|updates)/[\w/]+\.py"
)
# What attaches to optimizers. Their handles have no public place yet.
OF_STEPS = ()
# These have a proof whose code they name.
OF_PROOFS = ("architecture", "bound", "per-example", "accelerators")


def loss(params, x):
    """Return a loss with the gradient x."""
    return jnp.sum(x @ params)


def train(max_norm, seed):
    """Return what a training would."""
    return abs(max_norm - 1.0) + seed


def clipped_function():
    clipped = gradclip.clipped_grad(loss, 1.0, batch_argnums=1, microbatch_size="1 MiB", rule="automatic", pad_to=8)
    clipped(jnp.ones(3), jnp.ones((4, 3)))
    return clipped


def threshold(rule=None, steps=3):
    max_norm = gradclip.AdaptiveThreshold(rule)
    for step in range(steps):
        gradclip.clip_grad_norm_(np.full(4, step + 1.0), max_norm)
    return max_norm


def monitor():
    made = gradclip.Monitor(layers_every=1, callback=print)
    made.callback = None
    for step in range(9):
        made.record(1.0, 2.0, layer_norms={"a": 0.6, "b": 0.8}, loss=step)
    made.record(
        torch.tensor(100.0), 2.0, layer_norms={"a": torch.tensor(60.0), "b": torch.tensor(80.0)}, context=["batch", 9]
    )
    made.note(loss=0.25, context="next")
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    groups = [{"params": [parameter], "max_norm": 0.5, "name": "head"}]
    gradclip.clip_grad_norm_(groups, 1.0, monitor=made)
    return made


def private_run(**more):
    batches = gradclip.PoissonBatches(n=1000, rate=0.5, steps=4)
    sensitivity = gradclip.clipped_sum_sensitivity(1.0, batch_size=batches.pad_to, grid=2**20)
    return gradclip.PrivateRun(batches, sensitivity, delta=1e-5, noise_multiplier=2.0, **more)


def clipped_model():
    model = torch.nn.Linear(3, 2)
    integrations.torch.clip_in_backward(model, 1.0)
    return model


def of_history(rule):
    return rule.observe(rule.init(), 3.0)


def report():
    summed = gradclip.clipped_sum_sensitivity(1.0, batch_size=4)
    return gradclip.check_sensitivity(
        lambda grads: gradclip.per_example_clip(grads, 1.0)[0], np.ones((4, 2)), sensitivity=summed
    )


def state_of(transformation):
    return transformation.init({"w": jnp.ones(3)})


MADE = {
    "AdaptiveThreshold": threshold,
    "ClippedFunction": clipped_function,
    "ClippingError": lambda: gradclip.ClippingError("stopped"),
    "ClippingWarning": lambda: gradclip.ClippingWarning("found"),
    "ExampleOutputs": lambda: gradclip.ExampleOutputs(norms=np.ones(2)),
    "MaxNormSearch": lambda: gradclip.find_max_norm(train, [0.5, 1.0], seeds=2),
    "Monitor": monitor,
    "NativeStatus": gradclip.native_status,
    "NormHistory": lambda: of_history(gradclip.QuantileRule()),
    "PartialNorm": lambda: gradclip.partial_norm(np.ones(3)),
    "PerExampleInfo": lambda: gradclip.per_example_clip(np.ones((3, 2)), 1.0)[1],
    "PoissonBatches": lambda: private_run().batches,
    "PrivateQuantile": gradclip.PrivateQuantile,
    "PrivateQuantileState": lambda: gradclip.PrivateQuantile().init(),
    "PrivateRun": private_run,
    "QuantileRule": gradclip.QuantileRule,
    "Sensitivity": lambda: private_run().sensitivity,
    "SensitivityReport": report,
    "Spike": lambda: monitor().spikes[0],
    "SpikeExplanation": lambda: gradclip.explain_spike(loss, jnp.ones(3), batch=jnp.ones((4, 3))),
    "SpreadRule": gradclip.SpreadRule,
    "SteadyHistory": lambda: of_history(gradclip.SteadyRule()),
    "SteadyRule": gradclip.SteadyRule,
    "SumLayout": lambda: gradclip.SumLayout(partial_sums=8, partial_sums_in="bfloat16", elements=[jnp.ones(3)]),
    "UpdateCheck": lambda: gradclip.check_update(np.ones(3), 1.0, like=np.ones(2)),
}
MORE = {
    "an AdaptiveThreshold by SteadyRule": lambda: threshold(gradclip.SteadyRule()),
    "a ClippedFunction of results": lambda: gradclip.clipped_fun(loss, 1.0, batch_argnums=0),
    "a plan": lambda: clipped_function().plan(jnp.ones(3), jnp.ones((4, 3))),
    "records": lambda: monitor().records,
    "columns": lambda: monitor().columns,
    "layers": lambda: monitor().layers,
    "counts": lambda: monitor().counts,
    "advice": lambda: monitor().advise(),
    "groups": lambda: monitor().groups,
    "of optax": lambda: state_of(integrations.optax.adaptive_clip_by_global_norm()),
    "of optax, spikes": lambda: state_of(integrations.optax.skip_spikes(optax.sgd(1.0), skip_above=2.0)),
    "a model clipped in the backward pass": clipped_model,
    "a sampler": lambda: integrations.torch.PoissonSampler(private_run().batches),
}


def paths_in(pickled):
    """Return the texts in a pickle that are internal paths."""
    texts = [argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)]
    return [text for text in texts if "gradclip" in text and re.search(r"\b_src\b|\._[a-z]|^_", text)]


def told(found):
    """Return all that an object says of itself."""
    return f"{found!r}\n{found}"


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=1.0)


HANDLES = {
    "StepClipping": lambda: gradclip.clip_at_step(optimizer(), 1.0),
    "StepClipping of units": lambda: gradclip.clip_at_step(optimizer(), 1.0, scope="unit"),
    "EngineClipping": lambda: gradclip.clip_at_step(Engine(), 1.0),
    "UpdateClipping": lambda: gradclip.clip_update_at_step(optimizer(), 1.0),
    "ClippedInBackward": lambda: integrations.torch.clip_in_backward(torch.nn.Linear(3, 2), 1.0),
    "StepGuard": lambda: gradclip.guard(optimizer(), 1.0),
}
STATES = {"load_state_dict", "numbers", "remove", "state_dict"}
# Properties and methods that the reference shows, beside what stands under "Args" and "Attributes".
MEMBERS = {
    "AdaptiveThreshold": {
        *("history", "load_state_dict", "next_max_norm", "num_clipped", "num_skipped", "observe", "state_dict", "steps")
    },
    "ClippedFunction": {"max_norm", "plan", "sensitivity"},
    "PoissonBatches": {"drawn", "overflow", "secure"},
    "PrivateRun": {"add_noise", "epsilon", "exact", "load_state_dict", "releases", "state_dict"},
    "Sensitivity": {"noise_std", "total"},
    "StepClipping": STATES | {"scope"},
    "StepClipping of units": STATES | {"scope"},
    "EngineClipping": STATES,
    "UpdateClipping": {"numbers", "remove"},
    "ClippedInBackward": {"remove", "thresholds"},
    "StepGuard": {"remove"},
}


def documented(text):
    """Return the names under "Args" and "Attributes" of a docstring."""
    sections = re.findall(r"^(?:Args|Attributes):\n((?: +.*\n?|\n(?= ))+)", inspect.cleandoc(text or ""), re.M)
    return {name for one in sections for name in re.findall(r"^    (\w+):", one, re.M)}


@pytest.mark.parametrize("name", MEMBERS)
def test_an_object_shows_what_is_documented_alone(name):
    found = (MADE | HANDLES)[name]()
    texts = [kind.__doc__ for kind in type(found).__mro__]
    if name == "ClippedFunction":
        texts = [gradclip.clipped_grad.__doc__]
    shown = {one for one in dir(found) if one[0] != "_"}
    assert shown - MEMBERS[name] - set.union(*map(documented, texts)) == set()
    assert shown >= MEMBERS[name]


def test_every_public_class_is_among_those_made():
    classes = {name for name in gradclip.__all__ if isinstance(getattr(gradclip, name), type)}
    assert classes == MADE.keys()


@pytest.mark.parametrize("name", gradclip.__all__)
def test_public_objects_say_gradclip(name):
    found = getattr(gradclip, name)
    assert (found.__module__, found.__qualname__) == ("gradclip", name)
    assert paths_in(pickle.dumps(found)) == []


@pytest.mark.parametrize("name", dir(gradclip.typing))
def test_records_and_protocols_say_where_they_are(name):
    found = getattr(gradclip.typing, name)
    if isinstance(found, type) and "gradclip" in found.__module__:
        assert (found.__module__, found.__qualname__) == ("gradclip.typing", name)


def decorators_in(path):
    """Return for each class and function of a file what decorates it."""
    kinds = ast.ClassDef | ast.FunctionDef
    return {
        node.name: [ast.unparse(one) for one in node.decorator_list]
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, kinds)
    }


@pytest.mark.parametrize("library", [one.name for one in iter_modules(integrations.__path__) if one.name[0] != "_"])
def test_what_second_files_define_says_the_module_of_the_library(library):
    folder = Path(integrations.__file__).parent
    (listed,) = re.findall(r"^__all__ = (\[.*?\])", (folder / f"{library}.py").read_text("utf-8"), re.M | re.S)
    for path in folder.glob(f"_{library}_*.py"):
        marks = {name: marks for name, marks in decorators_in(path).items() if name in ast.literal_eval(listed)}
        assert all(found[0] == f"public_in('integrations.{library}')" for found in marks.values()), path.name


@pytest.mark.parametrize("library", INSTALLED)
def test_drop_ins_say_their_module(library):
    module = getattr(integrations, library)
    names = [name for name in module.__all__ if name not in OF_STEPS]
    assert {getattr(module, name).__module__ for name in names} <= {module.__name__, "gradclip"}
    text = pydoc.plain(pydoc.render_doc(module))
    lines = [line for line in text.splitlines() if not line.lstrip().startswith(OF_STEPS)]
    assert INTERNAL.findall("\n".join(lines)) == []


@pytest.mark.parametrize("name", [*MADE, *MORE])
def test_pickles_and_texts_name_public_paths_alone(name):
    found = (MADE | MORE)[name]()
    pickled = pickle.dumps(found)
    assert paths_in(pickled) == []
    assert INTERNAL.findall(told(found)) == []
    loaded = pickle.loads(pickled)
    assert type(loaded) is type(found)
    if type(found).__repr__ is not object.__repr__:
        assert repr(loaded) == repr(found) == repr(copy.deepcopy(found))


@pytest.mark.parametrize(
    "call",
    [
        lambda: integrations.jax_privacy.clipped_grad(loss, l2_clip_norm=1.0),
        lambda: integrations.jax_privacy.clipped_grad(loss, l2_clip_norm=1.0, method="auto"),
        lambda: integrations.jax_privacy.clipped_fun(loss, l2_clip_norm=1.0, batch_argnums=1),
    ],
)
def test_pickled_functions_of_jax_privacy_are_made_again(call):
    found, given = call(), (jnp.ones(3), jnp.ones((4, 3)))
    pickled = pickle.dumps(found)
    assert paths_in(pickled) == []
    for again in (pickle.loads(pickled), copy.deepcopy(found)):
        assert again(*given).tolist() == found(*given).tolist()
        assert again.l2_norm_bound == found.l2_norm_bound


def test_the_error_for_a_function_that_cannot_be_pickled_names_it():
    for call in (integrations.jax_privacy.clipped_grad, gradclip.clipped_grad):
        name = "l2_clip_norm" if call is not gradclip.clipped_grad else "max_norm"
        with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
            pickle.dumps(call(lambda params, x: loss(params, x), **{name: 1.0}))


@pytest.mark.parametrize("name", MADE)
def test_saved_states_name_public_paths_alone(name):
    found = MADE[name]()
    saved = found.state_dict() if hasattr(found, "state_dict") else getattr(found, "to_json", str)()
    assert INTERNAL.findall(json.dumps(saved, default=repr)) == []


@pytest.mark.parametrize("name", ["gradclip", *gradclip.__all__])
def test_help_names_public_paths_alone(name):
    text = pydoc.plain(pydoc.render_doc(gradclip if name == "gradclip" else getattr(gradclip, name)))
    assert INTERNAL.findall(text.replace("    _src (package)\n", "").replace(str(ROOT), "")) == []


def test_the_map_is_the_first_two_screens_of_help():
    lines = pydoc.plain(pydoc.render_doc(gradclip)).splitlines()
    assert lines.index("PACKAGE CONTENTS") <= 60
    assert lines.index("CLASSES") <= 68


def test_pages_and_examples_name_public_paths_alone():
    folders = [ROOT / "docs", ROOT / "examples"]
    pages = [path for folder in folders for kind in ("md", "py") for path in folder.rglob(f"*.{kind}")]
    proven = {ROOT / "docs" / f"{name}.md" for name in OF_PROOFS}
    pages = [path for path in pages if path not in proven]
    assert len(pages) > 40
    texts = {path.name: path.read_text("utf-8") for path in [*pages, ROOT / "README.md", ROOT / "CHANGELOG.md"]}
    assert [name for name, text in texts.items() if re.search(r"\b_src\b|gradclip[./]integrations[./]_", text)] == []


def test_states_load_with_weights_only(tmp_path):
    torch.save({"max_norm": threshold().state_dict(), "monitor": monitor().state_dict()}, tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    again = gradclip.AdaptiveThreshold()
    again.load_state_dict(saved["max_norm"])
    assert again.max_norm == threshold().max_norm


def test_records_are_trees_of_every_framework():
    history = of_history(gradclip.SteadyRule())
    doubled = importlib.import_module("jax").tree.map(lambda x: x + x, gradclip.SteadyRule().init(jnp.ones(())))
    assert type(doubled) is type(history) is gradclip.SteadyHistory
    assert type(optax.tree.zeros_like(doubled)) is gradclip.SteadyHistory
    assert type(gradclip.clip_by_value(history, 1.0)) is gradclip.SteadyHistory

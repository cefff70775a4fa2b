"""What annotations of public objects say can be read while a program runs: by `typing`, pydantic and `inspect`."""

import dataclasses
import importlib
import inspect
import pkgutil
import subprocess
import sys
from types import SimpleNamespace
from typing import get_overloads, get_type_hints

import numpy as np
import pydantic
import pytest

import gradclip
import gradclip.integrations
import gradclip.typing

# They import libraries that are not here; the import of declearn changes the environment.
NOT_HERE = ("_", "declearn", "flower", "lightning", "transformers")
INTEGRATIONS = pkgutil.iter_modules(gradclip.integrations.__path__)
MODULES = [one.name for one in INTEGRATIONS if not one.name.startswith(NOT_HERE)]
ARBITRARY = pydantic.ConfigDict(arbitrary_types_allowed=True)
ONE = np.array([3.0, 4.0])
CALLS = {
    "clip_by_global_norm": ({"w": ONE}, 1),
    "clip_by_layer_norm": ({"w": ONE}, {"w": 1.0}),
    "clip_by_unit_norm": (ONE, np.float32(1)),
    "clip_by_value": (ONE, 2),
    "adaptive_grad_clip": ({"w": ONE}, {"w": ONE}),
    "global_norm": ([ONE],),
    "grad_norm": ([SimpleNamespace(grad=ONE)],),
    "layer_norms": ({"w": ONE},),
    "norm_at_most": (ONE, 5),
    "check_update": ({"w": ONE}, 5.0),
    "clipped_sum_sensitivity": ({"w": 3.0},),
    "per_example_clip": ({"w": ONE}, 1.0),
}
PUBLIC = {name: getattr(part, name) for part in (gradclip, gradclip.typing) for name in part.__all__}
DATACLASSES = [name for name, one in PUBLIC.items() if isinstance(one, type) and dataclasses.is_dataclass(one)]
IN_PLACE = ["clip_grad_norm_", "clip_grad_layer_norm_", "clip_grad_unit_norm_", "clip_grad_value_"]


def callables(found):
    """Yield a function, or a class with its methods and properties."""
    yield found
    for name in dir(found) if isinstance(found, type) else ():
        member = inspect.getattr_static(found, name)
        member = getattr(member, "fget", None) or getattr(member, "__func__", member)
        ours = str(getattr(member, "__globals__", {}).get("__name__")).startswith("gradclip")
        if inspect.isfunction(member) and ours and (name == "__init__" or not name.startswith("_")):
            yield member


def unreadable(found):
    """Return what is wrong with the annotations of a function, or of a class and its members."""
    wrong = []
    for one in callables(found):
        try:
            get_type_hints(one)
        except Exception as error:
            wrong.append(f"{one.__qualname__}: {error}")
    return wrong


@pytest.mark.parametrize("name", gradclip.__all__)
def test_annotations_evaluate(name):
    assert unreadable(getattr(gradclip, name)) == []


@pytest.mark.parametrize("module", MODULES)
def test_annotations_of_integrations_evaluate(module):
    found = importlib.import_module(f"gradclip.integrations.{module}")
    names = getattr(found, "__all__", [])  # the second files of an integration list none
    assert [wrong for name in names for wrong in unreadable(getattr(found, name))] == []


def test_annotations_that_do_not_evaluate_are_seen():
    def takes(x: "Missing") -> None: ...  # noqa: F821

    assert unreadable(takes) == [f"{takes.__qualname__}: name 'Missing' is not defined"]


def test_types_evaluate_and_import_no_framework():
    code = "import sys, gradclip.typing as t; [getattr(t, name) for name in t.__all__ if name not in {late}]; "
    code += "print([name for name in ('torch', 'jax', 'tensorflow', 'matplotlib') if name in sys.modules])"
    late = {"ClippedInBackward", "EngineClipping", "StepClipping", "StepGuard", "UpdateClipping"}  # they are PyTorch's
    found = subprocess.run([sys.executable, "-c", code.format(late=late)], capture_output=True, text=True, check=True)
    assert found.stdout == "[]\n"
    assert all(getattr(gradclip.typing, name) is not None for name in gradclip.typing.__all__)


@pytest.mark.parametrize("name", ["ClippedInBackward", "EngineClipping", "StepClipping", "StepGuard", "UpdateClipping"])
def test_annotations_of_handles_evaluate(name):
    assert unreadable(getattr(gradclip.typing, name)) == []
    get_type_hints(getattr(gradclip.typing, name).__init__)


@pytest.mark.parametrize("name", gradclip.typing.__all__)
def test_the_error_for_a_type_says_where_it_is(name):
    with pytest.raises(AttributeError, match=rf"'gradclip' has no attribute '{name}'. Import it from gradclip.typing"):
        getattr(gradclip, name)


def test_a_misspelt_type_is_an_error():
    with pytest.raises(AttributeError, match=r"module 'gradclip\.typing' has no attribute 'Polcy'"):
        gradclip.typing.Polcy


@pytest.mark.parametrize("name", sorted(name for name in gradclip.__all__ if name[0].islower()))
def test_pydantic_reads_public_functions(name):
    pydantic.TypeAdapter(getattr(gradclip, name), config=ARBITRARY)


@pytest.mark.parametrize("name", sorted(name for name in gradclip.__all__ if name[0].islower()))
def test_pydantic_makes_calls_of_public_functions(name):
    pydantic.validate_call(getattr(gradclip, name), config=ARBITRARY)


@pytest.mark.parametrize("name", DATACLASSES)
def test_pydantic_models_hold_public_dataclasses(name):
    model = pydantic.create_model("Model", __config__=ARBITRARY, field=(PUBLIC[name], ...))
    assert model.__pydantic_complete__
    assert not [one.name for one in dataclasses.fields(PUBLIC[name]) if isinstance(one.type, str)]


@pytest.mark.parametrize("name", CALLS)
def test_calls_through_pydantic_give_the_same(name):
    function = getattr(gradclip, name)
    found, expected = (call(*CALLS[name]) for call in (pydantic.validate_call(function, config=ARBITRARY), function))
    assert repr(found) == repr(expected)


@pytest.mark.parametrize("name", IN_PLACE)
def test_calls_in_place_through_pydantic_clip(name):
    call = pydantic.validate_call(getattr(gradclip, name), config=ARBITRARY)
    tree, parameter = {"w": np.array([[3.0, 4.0]])}, SimpleNamespace(grad=np.array([3.0, 4.0]))
    call(tree, 1)
    call(iter([parameter]), 1.0)
    assert np.abs(tree["w"]).max() <= 1
    assert np.abs(parameter.grad).max() <= 1


@pytest.mark.parametrize("wrong", [{"max_norm": "one"}, {"nonfinite": "ignore"}])
def test_pydantic_refuses_what_is_wrong(wrong):
    call = pydantic.validate_call(gradclip.clip_by_global_norm, config=ARBITRARY)
    with pytest.raises(pydantic.ValidationError):
        call(ONE, **{"max_norm": 1.0} | wrong)


def overloads_of(function):
    function = inspect.unwrap(function)
    if isinstance(function, type):
        return []
    return get_overloads(SimpleNamespace(__module__=function.__globals__["__name__"], __qualname__=function.__name__))


def arguments_of(overload):
    """Return the names of the arguments, with those of the dict that stands for the keywords."""
    for name, one in inspect.signature(overload, eval_str=False).parameters.items():
        if one.kind is one.VAR_KEYWORD:
            options = one.annotation.removeprefix("Unpack[").removesuffix("]")
            yield from overload.__globals__[options].__annotations__
        else:
            yield name


WITH_OVERLOADS = [name for name in gradclip.__all__ if overloads_of(getattr(gradclip, name))]


@pytest.mark.parametrize("name", WITH_OVERLOADS)
def test_overloads_take_what_the_function_takes(name):
    function = getattr(gradclip, name)
    for overload in overloads_of(function):
        assert set(arguments_of(overload)) == set(inspect.signature(function).parameters)

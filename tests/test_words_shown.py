"""Errors show what was passed whole, or say what it is, in one line."""

import re
from collections import OrderedDict
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip
from gradclip._src.words import printable, shown, typed

SOURCES = Path(gradclip.__file__).parent


class Unprintable:
    def __repr__(self):
        raise RuntimeError("deleted")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.5, "1.5"),
        ("zeros", "'zeros'"),
        ("a  b", "'a  b'"),
        (np.eye(2), "array([[1., 0.], [0., 1.]])"),
        (np.zeros((50, 40), np.float16), "an array of type ndarray, shape (50, 40) and dtype float16"),
        (torch.zeros(100), "an array of type Tensor, shape (100,) and dtype float32"),
        (list(range(1234)), "an object of type list with 1,234 entries"),
        (OrderedDict.fromkeys(map(str, range(100))), "an object of type OrderedDict with 100 entries"),
        ("x" * 200, f"a str of 200 characters that begins with '{'x' * 40}'"),
        (10**400, "an integer of 1329 bits"),
    ],
    ids=lambda value: str(type(value).__name__),
)
def test_a_value_is_shown_whole_or_described(value, text):
    assert shown(value) == text


def test_what_has_no_text_is_described():
    assert shown(10**5000) == "an integer of 16610 bits"
    assert shown(Unprintable()) == "an object of type Unprintable"


def test_a_type_is_said_once():
    assert typed("1") == "'1' of type str"
    assert typed(list(range(100))) == "an object of type list with 100 entries"


def test_no_message_cuts_what_was_passed():
    cut = [
        f"{path.relative_to(SOURCES)}: {found}"
        for path in SOURCES.rglob("*.py")
        for found in re.findall(r"\{[^{}]*![rs]:\.\d+\}", path.read_text("utf-8"))
    ]
    assert cut == []


LARGE = {f"layer{place}": np.ones((30, 30)) for place in range(40)}
MISTAKES = {
    "threshold": lambda: gradclip.clip_by_global_norm(np.ones(2), LARGE),
    "threshold, an array": lambda: gradclip.clip_by_global_norm(np.ones(2), np.ones((30, 30))),
    "two trees": lambda: gradclip.global_norm(LARGE, LARGE),
    "two arrays": lambda: gradclip.global_norm(np.ones(2), np.ones((30, 30))),
    "policy": lambda: gradclip.clip_by_global_norm(np.ones(2), 1.0, nonfinite=str(LARGE)),
    "mask": lambda: gradclip.per_example_clip(np.ones((2, 2)), 1.0, mask=list(range(1000))),
    "leaf": lambda: gradclip.global_norm([np.ones(2), "text " * 100]),
    "leaf of JAX": lambda: gradclip.global_norm([jnp.ones(2), "text " * 100]),
    "monitor": lambda: gradclip.clip_by_global_norm(np.ones(2), 1.0, monitor=LARGE),
    "axis": lambda: gradclip.clip_by_unit_norm(np.ones((2, 2)), 1.0, unit_axis=LARGE),
    "numbers": lambda: gradclip.PartialNorm.from_json("[" * 300),
    "where": lambda: gradclip.global_norm(LARGE, where=LARGE),
    "seed": lambda: gradclip.PoissonBatches(100, 0.1, steps=2, seed=list(range(500))),
    "loss": lambda: gradclip.clipped_grad(LARGE, 1.0),
}


@pytest.mark.parametrize("call", MISTAKES.values(), ids=MISTAKES)
def test_an_error_about_a_large_value_is_short(call):
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    text = str(raised.value)
    assert len(text.splitlines()) <= 3
    assert len(text) < 500
    assert not re.search(r"array\(\[.*\.\.\.", text)


def test_who_passes_two_arrays_is_not_told_about_numbers_only():
    with pytest.raises(ValueError, match="To measure several arrays together, pass them as one list"):
        gradclip.global_norm(np.ones(2), np.ones(2))
    with pytest.raises(ValueError, match=r"got 0\.5\. For the Euclidean norm leave it out"):
        gradclip.global_norm(np.ones(2), 0.5)


@pytest.mark.parametrize(
    ("text", "longest", "said"),
    [
        ("encoder.w", None, "encoder.w"),
        ("a\x1b[31m\nb\u202e\ud800\x00", None, r"a\x1b[31m\nb\u202e\ud800\x00"),
        ("naïve \\ 'λ'", None, "naïve \\ 'λ'"),
        ("x" * 81, 81, "x" * 81),
        ("x" * 81, 80, "x" * 77 + "..."),
        (Path("a\tb"), None, r"a\tb"),
    ],
)
def test_text_of_others_is_shown_without_control_characters(text, longest, said):
    assert printable(text, longest) == said

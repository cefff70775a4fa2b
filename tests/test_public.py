"""What is public says so, and its types, its source and its doctests are found nevertheless."""

import doctest
import inspect
import typing
from dataclasses import dataclass
from typing import NamedTuple

import pytest

import gradclip
import public_doctests  # noqa: F401
from gradclip._src.monitor import records
from gradclip._src.public import defined_in, public, public_in

OWN = {"gradclip", "gradclip.__dir__", "gradclip.__getattr__"}


class Inner:
    """A type that `gradclip` does not have."""


@public
@dataclass
class Settings:
    """Fields with types in words."""

    inner: "Inner | None"
    again: "Settings | None" = None


@public_in("typing")
class Row(NamedTuple):
    """The same for a named tuple."""

    inner: "Inner"
    count: "int"


@public
def doubled(x: "Inner") -> "Inner":
    """Return it."""
    return x


def test_they_say_where_users_find_them():
    assert (Settings.__module__, Row.__module__, doubled.__module__) == ("gradclip", "gradclip.typing", "gradclip")
    assert [defined_in[one] for one in (Settings, Row, doubled)] == [__name__] * 3


def test_types_are_found():
    assert typing.get_type_hints(Settings) == {"inner": Inner | None, "again": Settings | None}
    assert typing.get_type_hints(Row) == {"inner": Inner, "count": int}
    assert typing.get_type_hints(doubled) == {"x": Inner, "return": Inner}


@pytest.mark.parametrize("name", sorted(name for name in gradclip.__all__ if isinstance(getattr(gradclip, name), type)))
def test_the_types_that_a_public_class_states_are_found(name):
    hints = typing.get_type_hints(getattr(gradclip, name))
    assert not any(isinstance(hint, str) for hint in hints.values())


def test_the_source_of_functions_and_methods_is_found():
    assert inspect.getsource(gradclip.clip_by_global_norm).lstrip("@").startswith("public\n@with_subnormals\ndef ")
    assert inspect.getsource(gradclip.Monitor.record).lstrip().startswith("def record(")
    with pytest.raises(OSError, match=r"class definition|source code"):  # as for NumPy's classes
        inspect.getsource(gradclip.Monitor)


def test_doctests_of_a_class_are_found_where_it_is_defined():
    inside = [test.name for test in doctest.DocTestFinder(exclude_empty=False).find(records)]
    assert "gradclip._src.monitor.records.Spike" in inside
    assert "gradclip._src.monitor.records.Step" in inside
    assert not {test.name for test in doctest.DocTestFinder(exclude_empty=False).find(gradclip)} - OWN

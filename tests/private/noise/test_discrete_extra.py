"""What is said of packages that are missing."""

import pytest

from gradclip._src.private.noise.discrete import needed_for


def test_the_package_and_the_extra_are_named():
    with (
        pytest.raises(
            ModuleNotFoundError, match=r"^this needs no-such, .* pip install '\.\[private\]' in a clone of gradclip$"
        ) as error,
        needed_for("this"),
    ):
        import no_such.part  # noqa: F401
    assert error.value.name == "no_such"


def test_other_errors_pass():
    with pytest.raises(ValueError, match="mine"), needed_for("this"):
        raise ValueError("mine")

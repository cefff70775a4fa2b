"""What a proof is here: a claim of a docstring, and how a machine checks it."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Refuted(Exception):  # noqa: N818 - it is a verdict
    """A claim was not proven. The text says what was tried."""


class Loosened(NamedTuple):
    """A constant of the source, by its dotted name, and another value of it."""

    name: str
    value: Any


class Claim(NamedTuple):
    """What is proven. Each module of this folder with a function `claims()` has its own.

    `module` is the dotted path of the module whose docstring has the claim in prose. `script` is the file of this
    folder that proves it, such as `coefficient.py`. `check` returns the proven margin as text, or raises `Refuted`; it
    reads the constants of the source when it is called. With each constant that is `loosened`, it must raise
    `Refuted`; with one that is loosened but `enough`, it must not.
    """

    name: str
    module: str
    script: str
    check: Callable[[], str]
    loosened: tuple[Loosened, ...] = ()
    enough: tuple[Loosened, ...] = ()

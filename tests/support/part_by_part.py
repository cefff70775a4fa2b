"""Layouts of several norms: decide them part by part, or never."""

from contextlib import contextmanager
from unittest import mock

from gradclip._src.backends.host.laid import Laid
from gradclip._src.core import pipeline


@contextmanager
def part_by_part():
    """Have each part measured and decided by itself."""
    with mock.patch.object(Laid, "norms", return_value=None):
        yield


@contextmanager
def at_once():
    """Fail where a part is measured or decided by itself."""
    with mock.patch.object(pipeline, "_measured", None):
        yield

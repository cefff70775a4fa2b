"""What waits for a module to be imported."""

from fresh_process import run

WATCHED = """
import sys
from gradclip._src.backends.imported import when_imported

before = list(sys.meta_path)
told = []
when_imported("colorsys", lambda: told.append(sys.modules["colorsys"].rgb_to_hsv(0, 0, 0)))
assert told == [] and "colorsys" not in sys.modules
import colorsys
assert len(told) == 1
assert sys.meta_path == before
when_imported("colorsys", lambda: told.append(2))
assert told[1:] == [2]
when_imported("no_such_module", lambda: told.append(3))
try:
    import no_such_module
except ModuleNotFoundError as error:
    assert error.name == "no_such_module"
assert told[2:] == []
"""


def test_what_waits_for_a_module_is_done_once(tmp_path):
    run(WATCHED, tmp_path)


SEVERAL = """
import sys
from gradclip._src.backends.imported import when_imported

before, told = list(sys.meta_path), []
for number in range(3):
    when_imported("colorsys", lambda number=number: told.append(number))
import colorsys
assert told == [0, 1, 2]
assert sys.meta_path == before
"""


def test_several_wait_for_one_module(tmp_path):
    run(SEVERAL, tmp_path)

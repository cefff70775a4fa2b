"""The arithmetic of a thread is ordinary within a call, and is left as it was."""

from types import SimpleNamespace

import pytest

from gradclip._src import flush_mode
from gradclip._src.flush_mode import caller_flushes, flushes, with_subnormals
from rounding import DIRECTIONS, direction, rounding
from subnormals import flushing


@pytest.mark.after_error
def test_the_thread_is_left_as_it_was():
    @with_subnormals
    def looked(deeper=True):
        assert not flushes()
        return (caller_flushes(), looked(deeper=False) if deeper else None)

    @with_subnormals
    def fails():
        raise KeyError

    assert looked() == (False, (False, None))
    with flushing():
        assert looked() == (True, (True, None))
        assert caller_flushes()
        with pytest.raises(KeyError):
            fails()
        assert flushes()
    assert looked() == (False, (False, None))


@pytest.mark.parametrize("name", DIRECTIONS)
@pytest.mark.parametrize("both", [False, True], ids=["rounding", "flushing too"])
def test_a_thread_that_rounds_in_one_direction_does_so_again_afterwards(name, both):
    @with_subnormals
    def looked():
        return direction(), flushes(), caller_flushes()

    with rounding(name):
        if both:
            with flushing():
                assert looked() == (0, False, True)
                assert direction() == DIRECTIONS[name]
        else:
            assert looked() == (0, False, False)
        assert direction() == DIRECTIONS[name]


@pytest.mark.parametrize("when", ["fegetenv", "fesetenv 1", "function", "fesetenv 2"])
def test_a_signal_handler_that_raises_leaves_the_thread_as_it_was(monkeypatch, when):
    """Handlers run after a call has returned, as if it had raised when all was done."""
    functions, default = flush_mode._library()
    calls = iter(["fesetenv 1", "fesetenv 2"])

    def interrupted(name, function):
        def call(*args):
            found = function(*args)
            if when == (name if name != "fesetenv" else next(calls)):
                raise KeyboardInterrupt
            return found

        return call

    wrapped = {name: interrupted(name, getattr(functions, name)) for name in ("fegetenv", "fesetenv")}
    monkeypatch.setattr(flush_mode, "_library", lambda: (SimpleNamespace(**wrapped), default))
    work = with_subnormals(interrupted("function", lambda: None))
    with flushing():
        with pytest.raises(KeyboardInterrupt):
            work()
        assert flushes()
    assert not caller_flushes()

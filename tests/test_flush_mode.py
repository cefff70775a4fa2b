"""The arithmetic of a thread is ordinary within a call, and is left as it was."""

import pytest

from gradclip.flush_mode import caller_flushes, flushes, with_subnormals
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

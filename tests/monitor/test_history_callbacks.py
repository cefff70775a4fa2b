"""Steps are told one at a time and in their order; more is in test_monitor.py."""

from threading import Event, Thread

from gradclip._src.monitor.history import Callbacks


def test_steps_added_while_others_are_told_are_told_next():
    callbacks, told = Callbacks(), []

    def callback(step):
        if step == 1:
            callbacks.add([3])
            assert callbacks.tell(callback) is None
            callbacks.wait()  # not for itself
        told.append(step)

    callbacks.add([1, 2])
    assert callbacks.tell(callback) is None
    assert told == [1, 2, 3]


def test_the_first_error_is_returned():
    callbacks = Callbacks()
    callbacks.add("ab")
    assert repr(callbacks.tell(lambda step: [][ord(step)])) == "IndexError('list index out of range')"
    assert callbacks.tell(lambda step: None) is None


def test_one_waits_for_the_thread_that_tells():
    callbacks, begun, go, told = Callbacks(), Event(), Event(), []
    callbacks.add([1])
    teller = Thread(target=lambda: callbacks.tell(lambda step: (begun.set(), go.wait(10), told.append(step))))
    teller.start()
    begun.wait(10)
    go.set()
    callbacks.wait()
    assert told == [1]
    teller.join()

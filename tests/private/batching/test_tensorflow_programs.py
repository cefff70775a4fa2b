import numpy as np
import tensorflow as tf

from gradclip._src.private.batching.tensorflow import by_program
from gradclip._src.private.batching.verbs import Programs


def run(scale):
    def function(x, factor):
        recorded.append(x)
        return {"y": x * factor * scale}, [x.dtype]

    recorded = []
    return function, recorded


def test_a_call_is_recorded_once_for_each_shape_and_constant():
    programs, (function, recorded) = Programs(), run(1.0)
    for x, factor in [([1.0], 2.0), ([3.0], 2.0), ([3.0], 5.0), ([1.0, 2.0], 2.0)]:
        made, dtypes = by_program(programs, None, function, [tf.constant(x), factor])
        assert made["y"].numpy().tolist() == [one * factor for one in x]
        assert dtypes == [tf.float32]
    assert len(recorded) == len(programs) == 3


def test_equal_numbers_of_other_types_are_other_constants():
    programs, (function, _) = Programs(), run(1)
    by_program(programs, None, function, [tf.constant([1.0]), 1.0])
    by_program(programs, None, function, [tf.constant([1.0]), 1])
    assert len(programs) == 2


def test_settings_that_hold_arrays_are_not_kept():
    programs, (function, recorded) = Programs(), run(1.0)
    for _ in range(2):
        by_program(programs, {"max_norm": np.ones(2)}, function, [tf.constant([1.0]), 1.0])
    assert len(recorded) == 2
    assert not programs


def test_nothing_is_kept_while_somebody_records():
    programs, (function, _) = Programs(), run(1.0)
    tf.function(lambda x: by_program(programs, None, function, [x, 1.0])[0])(tf.constant([1.0]))
    assert not programs


def test_the_oldest_goes_first():
    programs, (function, _) = Programs(), run(1.0)
    for i in range(Programs.most + 1):
        programs[i] = None
    by_program(programs, None, function, [tf.constant([1.0]), 1.0])
    assert len(programs) == Programs.most
    assert 0 not in programs

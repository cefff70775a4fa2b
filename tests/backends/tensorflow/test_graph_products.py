import numpy as np
import tensorflow as tf

from gradclip._src.backends.tensorflow.graph import assigned, elements_by_format, multiplied, without_nonfinite
from gradclip._src.core.arrays import Arrays
from gradclip._src.core.formats import FLOAT16, FLOAT32, FLOAT64
from gradclip._src.core.rules import OneFactor


def made(tensors, factor, **options):
    arrays = Arrays(tensors)
    formats = elements_by_format(arrays)
    factors = {x.name: tf.constant(factor, tf.float64 if x is FLOAT64 else tf.float32) for x in formats}
    return multiplied(arrays, OneFactor(factors, **options))


def test_elements_are_counted_by_format_the_widest_first():
    given = [tf.ones([2, 3], tf.float16), tf.ones([4], tf.complex64), tf.ones([], tf.float64), tf.ones([5])]
    assert list(elements_by_format(Arrays(given)).items()) == [(FLOAT64, 1), (FLOAT32, 13), (FLOAT16, 6)]


def test_a_length_that_is_not_known_counts_as_many():
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])
    def record(x):
        found.append(elements_by_format(Arrays([x]))[FLOAT32])
        return x

    record(tf.ones([3, 2]))
    assert found == [2**31]


def test_tensors_come_back_as_they_are_where_the_number_is_1():
    x = tf.constant(np.float32([2.0**-149, 1.0, -0.0]))
    (result,) = tf.function(lambda: made([x], 1.0))()
    assert np.array_equal(np.asarray(result).view(np.int32), np.asarray(x).view(np.int32))


def test_parts_of_complex_numbers_are_multiplied_by_themselves():
    # As one product, inf * (0.5 + 0i) would be NaN in its other part.
    (result,) = made([tf.constant([complex(np.inf, 2.0), 4 + 2j], tf.complex64)], 0.5)
    assert np.asarray(result).tolist() == [complex(np.inf, 1.0), 2 + 1j]


def test_products_of_float16_are_moved_toward_zero():
    x = tf.constant([2.0**-24, 3 * 2.0**-24, -3 * 2.0**-24, 1.0], tf.float16)
    (result,) = made([x], 0.75, steps=tf.constant(-1.0))
    assert np.asarray(result).tolist() == [0.0, 2.0**-24, -(2.0**-24), 0.75]


def test_nan_becomes_zero_where_that_is_asked_for():
    for factor, alive, last in ((0.5, True, 2.0), (0.0, False, 0.0)):
        (result,) = made([tf.constant([np.nan, np.inf, 4.0])], factor, alive=tf.constant(alive))
        assert np.asarray(result).tolist() == [0.0, 0.0, last]


def test_a_complex_number_goes_as_a_whole():
    found = without_nonfinite(tf.constant([complex(1.0, np.nan), 1 + 1j], tf.complex128))
    assert np.asarray(found).tolist() == [0j, 1 + 1j]


def test_each_layer_has_a_number_of_its_own():
    arrays = Arrays([tf.constant([2.0]), tf.constant([4.0]), tf.constant([8.0])])
    by = OneFactor({"float32": tf.constant([0.5, 1.0])}, sizes=[2, 1])
    assert [np.asarray(x).tolist() for x in multiplied(arrays, by)] == [[1.0], [2.0], [8.0]]


def test_variables_are_assigned_to():
    variable, tensor = tf.Variable([1.0]), tf.constant([1.0])
    assert assigned(variable, tf.constant([2.0])) is variable
    assert variable.numpy() == [2.0]
    assert assigned(tensor, tf.constant([3.0])).numpy() == [3.0]

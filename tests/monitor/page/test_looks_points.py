"""Fewer points, with the extremes kept."""

import math

import numpy as np

from gradclip._src.monitor.page.looks import bins_of, columns_of, envelope, largest, span_of


def test_parts_are_nearly_equal_and_cover_all():
    parts = bins_of(10, 4)
    assert [part.stop - part.start for part in parts] == [2, 3, 3, 2]
    assert (parts[0].start, parts[-1].stop) == (0, 10)
    assert len(bins_of(3, 10)) == 3
    assert bins_of(0, 10) == []


def test_an_envelope_keeps_extremes_in_their_order():
    y = np.array([1.0, 9.0, 0.5, 1.0, math.nan, math.nan, math.nan, math.nan])
    x, reduced = envelope(np.arange(8), y, 2)
    assert x.tolist() == [1, 2, 4]
    np.testing.assert_array_equal(reduced, [9.0, 0.5, math.nan])
    assert envelope(np.arange(8), y, 4)[1] is y


def test_the_largest_of_each_part():
    y = np.array([1.0, 9.0, 0.5, math.nan, 2.0, 3.0])
    assert largest(y, y > 0.7, 4).tolist() == [0, 1, 4, 5]
    assert largest(y, y > 0.7, 2).tolist() == [1, 5]
    assert largest(y, np.isnan(y), 2).tolist() == [3]
    assert largest(np.full(4, math.nan), np.ones(4, bool), 2).tolist() == [0, 2]


def test_columns_of_a_table():
    table = np.array([[1.0, 3.0, math.nan, math.nan], [5.0, math.nan, 2.0, 1.0]])
    for every in (1, 10):
        steps = 1 + every * np.arange(4)
        assert span_of(steps) == (4 * every, every)
        np.testing.assert_array_equal(columns_of(table, steps, 2), [[3.0, math.nan], [5.0, 2.0]])
        np.testing.assert_array_equal(columns_of(table, steps, 4), table)


def test_columns_are_at_the_places_of_their_steps():
    table, steps = np.array([[1.0, 2.0, 3.0, math.nan, 4.0]]), np.array([1, 2, 3, 7, 10])
    np.testing.assert_array_equal(columns_of(table, steps, 99)[0], [1, 2, 3, 3, 3, 3, *[math.nan] * 3, 4])
    np.testing.assert_array_equal(columns_of(table, steps, 5)[0], [2, 3, 3, math.nan, 4])
    np.testing.assert_array_equal(columns_of(table[:, :1], steps[:1], 5)[0], [1])
    assert columns_of(table, np.array([1, 2, 3, 1, 2]), 9).shape == (1, 3)  # two files, one after the other


def test_a_step_that_is_not_sampled_counts_for_its_own_part():
    table, steps = np.array([[1.0, 9.0, 2.0, 3.0]]), np.array([1, 15, 11, 31])
    table, steps = table[:, [0, 2, 1, 3]], np.sort(steps)
    sampled = np.array([True, True, False, True])
    assert span_of(steps, sampled) == (40, 10)
    np.testing.assert_array_equal(columns_of(table, steps, 99, sampled)[0], [1, 9, 2, 3])

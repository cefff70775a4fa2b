"""How arrays differ from a template."""

import numpy as np

from gradclip._src.updates.verdict import Slot, differences, of_arrays
from held import held

LIKE = [Slot("w", "float32", (2, 3)), Slot("b", "float64", ()), Slot("n", "int64", ())]
FITTING = {"w": np.zeros((2, 3), np.float32), "b": np.float64(0), "n": np.int64(0)}


def test_the_order_does_not_matter():
    for names in (("w", "b", "n"), ("n", "w", "b")):
        assert differences(held(**{name: FITTING[name] for name in names}), LIKE) == []
    assert of_arrays(held(**FITTING)) == LIKE


def test_each_difference_is_named():
    given = {"w": np.zeros((3, 2), np.float16), "n": np.float32(0), "x": np.zeros(1)}
    assert differences(held(**given), LIKE) == [
        "'b' is missing",
        "'x' is not in the template",
        "'w' has shape (3, 2), not (2, 3)",
        "'w' has dtype float16, not float32; 'n' has dtype float32, not int64",
    ]


def test_many_names_are_cut():
    (said,) = differences(held(**{f"x{i}": np.zeros(1) for i in range(30)}), [])
    assert said.startswith("30 arrays are not in the template: 'x0', 'x1'")
    assert said.endswith("and 20 more")


def test_no_two_shapes_or_dtypes_of_one_number_are_alike():
    for other in (np.zeros(6, np.float32), np.zeros((2, 3, 1), np.float32), np.zeros((2, 3), np.float64)):
        assert differences(held(**{**FITTING, "w": other}), LIKE)

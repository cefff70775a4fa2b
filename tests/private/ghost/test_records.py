"""Places of matrices in a parameter."""

from gradclip._src.private.ghost.records import MatrixPlace


def test_a_place_has_blocks_rows_and_columns():
    # Of a parameter of shape (4, 6, 5): its rows 1 to 2, reshaped to (2, 3, 2, 5).
    place = MatrixPlace((1, 0, 0), (3, 6, 5), (2, 3, 2, 5), (0,), (2, 1), (3,))
    assert place.box == (2, 6, 5)
    assert place.shape == (2, 6, 5)
    assert place.axes == (0, 2, 1, 3)

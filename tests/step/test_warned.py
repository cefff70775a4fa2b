"""The warning and the error about mistakes in clipping."""

import gradclip


def test_warnings_can_be_filtered_as_warnings_of_users():
    assert issubclass(gradclip.ClippingWarning, UserWarning)
    assert issubclass(gradclip.ClippingError, RuntimeError)

"""The operations of the array API, imported when the first of them is used."""

import numpy as np
import pytest

from gradclip._src.backends.host.backend import Namespace


def test_operations_are_looked_up_once():
    namespace = Namespace("operations")
    before = set(vars(namespace))
    assert "concat" not in before
    assert namespace.concat([np.ones(1), np.zeros(2)]).tolist() == [1.0, 0.0, 0.0]
    assert set(vars(namespace)) - before == {"concat"}


def test_what_is_no_operation_is_an_attribute_error():
    with pytest.raises(AttributeError):
        _ = Namespace("operations").no_such_operation

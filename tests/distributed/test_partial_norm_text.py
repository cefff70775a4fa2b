"""What is no number of a partial norm."""

import pytest

from gradclip._src.distributed.partial_norm import number


@pytest.mark.parametrize(("value", "error"), [(True, TypeError), ("1", TypeError), (10**400, ValueError)])
def test_what_is_no_number(value, error):
    with pytest.raises(error, match="numbers must hold numbers"):
        number("numbers", value)

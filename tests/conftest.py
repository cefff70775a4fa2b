import pytest

from frameworks import WITH_FLOAT32, by_name


@pytest.fixture(params=WITH_FLOAT32, ids=by_name)
def framework(request):
    return request.param

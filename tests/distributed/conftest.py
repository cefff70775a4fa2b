import pytest

import processes


@pytest.fixture(autouse=True, scope="package")
def end_the_process_that_is_forked():
    yield
    processes.end()

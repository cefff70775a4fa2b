"""NumPy gradients of the kind that Python's buffers do not know, beside ones that cannot be written."""

import ml_dtypes
import numpy as np
import pytest

import gradclip


class Parameter:
    def __init__(self, grad):
        self.grad = grad


def read_only():
    grad = np.array([3.0, 4.0], np.float32)
    grad.flags.writeable = False
    return grad


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64, np.complex64])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("nonfinite", ["propagate", "zero"])
def test_any_gradient_beside_one_that_is_replaced(values, dtype, last, nonfinite):
    grad = np.array(values).astype(dtype)
    parameters = [Parameter(read_only()), Parameter(grad)][:: -1 if last else 1]
    assert gradclip.clip_grad_norm_(parameters, 1.0, nonfinite=nonfinite) == 5.0
    replaced, written = parameters[:: -1 if last else 1]
    assert written.grad is grad
    assert not grad.any()
    np.testing.assert_allclose(replaced.grad, [0.6, 0.8], rtol=1e-6)

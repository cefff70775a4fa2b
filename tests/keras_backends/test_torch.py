"""What another backend has saved."""

import keras
import numpy as np
import pytest

import fresh_process
from gradclip import SpreadRule
from gradclip.integrations.keras import clipped
from keras_backends.known_gradients import SGD, linear_model
from keras_backends.test_thresholds import NORMS, on_host, recorded

SAVING = """
    import keras, pathlib, sys, warnings
    import numpy as np
    from gradclip import SpreadRule
    from gradclip.integrations.keras import clipped
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    data = np.ones((4, 2), np.float32)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2, kernel_initializer="ones")])
    optimizer = clipped(keras.optimizers.Lion)(learning_rate=0.01, max_norm=SpreadRule(0.5, window=4))
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(data, data, epochs=2, verbose=0, shuffle=False)
    model.save(pathlib.Path(sys.argv[1]) / "model.keras")
    print(keras.config.backend())
    """


def state(optimizer):
    observed = [int(variable.numpy()) for variable in optimizer.variables if variable.name == "count"]
    return type(optimizer).__name__, optimizer.max_norm, int(optimizer.iterations), observed


@pytest.mark.slow  # test_training.py loads one of the same process
def test_a_saved_model_is_loaded_in_a_process_of_another_backend(tmp_path):
    assert fresh_process.run(SAVING, tmp_path, KERAS_BACKEND="jax") == "jax"
    model = keras.saving.load_model(tmp_path / "model.keras")
    assert state(model.optimizer) == ("ClippedLion", SpreadRule(0.5, window=4), 2, [2])
    assert type(model.optimizer) is clipped(keras.optimizers.Lion)
    data = np.ones((4, 2), np.float32)
    model.fit(data, data, epochs=1, verbose=0, shuffle=False)
    assert state(model.optimizer) == ("ClippedLion", SpreadRule(0.5, window=4), 3, [3])


@pytest.mark.slow  # compiling takes long, and the steps are those of other tests
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_steps_have_the_thresholds_of_the_host():
    model = linear_model(SGD(1.0, max_norm=SpreadRule(window=4), nonfinite="drop"), jit_compile=True)
    norms, thresholds = zip(*recorded(model, NORMS), strict=True)
    assert list(thresholds) == on_host(SpreadRule(window=4), norms)

"""What another backend has saved."""

import keras
import numpy as np
import pytest

import fresh_process
from gradclip.integrations.keras import clipped

SAVING = """
    import keras, pathlib, sys, warnings
    import numpy as np
    from gradclip.integrations.keras import clipped
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    data = np.ones((4, 2), np.float32)
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2, kernel_initializer="ones")])
    model.compile(clipped(keras.optimizers.Lion)(learning_rate=0.01, max_norm=0.5), "mse", jit_compile=False)
    model.fit(data, data, epochs=2, verbose=0, shuffle=False)
    model.save(pathlib.Path(sys.argv[1]) / "model.keras")
    print(keras.config.backend())
    """


def state(optimizer):
    return type(optimizer).__name__, optimizer.max_norm, int(optimizer.iterations), float(optimizer.clipped_share)


@pytest.mark.slow  # test_training.py loads one of the same process
def test_a_saved_model_is_loaded_in_a_process_of_another_backend(tmp_path):
    assert fresh_process.run(SAVING, tmp_path, KERAS_BACKEND="jax") == "jax"
    model = keras.saving.load_model(tmp_path / "model.keras")
    assert state(model.optimizer) == ("ClippedLion", 0.5, 2, 1.0)
    assert type(model.optimizer) is clipped(keras.optimizers.Lion)
    data = np.ones((4, 2), np.float32)
    model.fit(data, data, epochs=1, verbose=0, shuffle=False)
    assert state(model.optimizer) == ("ClippedLion", 0.5, 3, 1.0)

"""Optimizers of Keras: the tests in `keras_backends`, in a process for each backend, since the import chooses it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fresh_process

FOLDER = Path(__file__).parents[1] / "keras_backends"
# Keras' arrays do not know NumPy's `copy` yet.
PASSED_OVER = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3"}


@pytest.mark.parametrize("backend", ["jax", "torch", "tensorflow"])
def test_on_backend(backend, pytestconfig):
    environment = os.environ | QUIET | {"KERAS_BACKEND": backend}
    environment.pop("PYTEST_XDIST_WORKER", None)
    options = ["-q", "-n0", "-p", "no:cacheprovider", "--confcutdir", str(FOLDER), "-W", PASSED_OVER]
    options += ["-m", pytestconfig.option.markexpr]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(FOLDER)],
        cwd=FOLDER.parents[1],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert " passed" in done.stdout


MODEL = """
    import keras, pathlib, sys, warnings
    import numpy as np
    import gradclip.integrations.keras as integration
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    file = pathlib.Path(sys.argv[1]) / "model.keras"
    data = np.ones((4, 2), np.float32)
    {}
    model.fit(data, data, epochs=1, verbose=0, shuffle=False)
    optimizer = model.optimizer
    print(type(optimizer).__name__, optimizer.max_norm, int(optimizer.iterations), float(optimizer.clipped_share))
    """


@pytest.mark.slow  # tests/keras_backends/test_training.py loads one in the same process
def test_a_saved_model_is_loaded_in_a_new_process_of_another_backend(tmp_path):
    saving = """
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2, kernel_initializer="ones")])
    optimizer = integration.clipped(keras.optimizers.Lion)(learning_rate=0.01, max_norm=0.5)
    model.compile(optimizer, "mse", jit_compile=False)
    model.fit(data, data, epochs=2, verbose=0, shuffle=False)
    model.save(file)
    """
    run = lambda code, backend: fresh_process.run(MODEL.format(code), tmp_path, KERAS_BACKEND=backend, **QUIET)
    assert run(saving, "jax") == "ClippedLion 0.5 3 1.0"
    assert run("model = keras.saving.load_model(file)", "torch") == "ClippedLion 0.5 3 1.0"

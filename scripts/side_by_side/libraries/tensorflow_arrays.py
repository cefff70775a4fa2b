"""What the TensorFlow and Keras modules share: an import without messages, and making tensors."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import tensorflow as tf

__all__ = ["tf"]

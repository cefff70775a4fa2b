"""What the modules of TensorFlow and Keras share: its import without its messages, and how tensors are made."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import tensorflow as tf

__all__ = ["tf"]

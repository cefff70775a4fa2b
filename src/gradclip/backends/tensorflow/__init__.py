"""TensorFlow's tensors and variables."""

"""One private training run: the batches that an accountant assumes, and the privacy that is spent."""

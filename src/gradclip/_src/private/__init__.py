"""Private training: batches that an accountant assumes, and noise whose distribution is exact."""

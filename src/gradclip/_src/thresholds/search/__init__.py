"""Short trainings over thresholds and learning rates, to find the threshold that trains best."""

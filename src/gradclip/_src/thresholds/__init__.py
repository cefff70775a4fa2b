"""Thresholds that follow the norms of the gradients."""

"""Thresholds that follow the norms."""

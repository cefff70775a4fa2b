"""Logs of training runs: the norms they hold, what clipping did to them, and what other thresholds would have done."""

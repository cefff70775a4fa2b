"""Judging updates that others send, in memory and in files: is the norm within a bound, and if not, why."""

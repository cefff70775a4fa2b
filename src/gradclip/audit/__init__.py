"""Tests of promises: a search for an example that moves a sum by more than promised, and an audit of a run by canaries."""

"""Tests of promises: a search for examples that move a sum too far, and an audit of a run by canaries."""

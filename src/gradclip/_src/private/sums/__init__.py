"""Sums of clipped examples, and how far one example can move them, with the proofs."""

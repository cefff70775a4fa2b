"""The rules and proofs of clipping, independent of any framework."""

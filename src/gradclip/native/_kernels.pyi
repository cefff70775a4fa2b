"""The compiled kernels."""

def variants() -> list[str]:
    """The sets of instructions that this processor can run, the best last."""

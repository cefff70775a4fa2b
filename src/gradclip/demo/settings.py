"""The settings of the demo."""

import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoSettings:
    """The settings of `gradclip demo`. A value that cannot work raises ValueError.

    At the default learning rate, training needs clipping. The default threshold lets it learn, and clips most steps.
    """

    steps: int = 3000
    seeds: int = 5
    learning_rate: float = 0.05
    max_norm: float = 0.5
    out: Path = Path("gradclip-demo")

    def __post_init__(self) -> None:
        for name in ("steps", "seeds"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ValueError(
                    f"{name} must be a whole number of at least 1, got {count!r}. "
                    f"Pass --{name} {getattr(DemoSettings, name)}, for example."
                )
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(
                f"learning_rate must be positive and finite, got {self.learning_rate!r}. "
                f"Pass --learning-rate {DemoSettings.learning_rate}, for example."
            )
        # This form also rejects NaN.
        if not self.max_norm >= 0:
            raise ValueError(
                f"max_norm must not be negative or NaN, got {self.max_norm!r}. "
                "To switch clipping off, pass --max-norm inf."
            )
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(
                f"out must be a folder or a new path, got the file {str(self.out)!r}. Pass a folder with --out."
            )

"""The settings of the demo."""

import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoSettings:
    """The settings of `gradclip demo`. A value that cannot work raises ValueError."""

    steps: int = 1500
    seeds: int = 3
    rates: tuple[float, ...] = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
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
        rising = all(low < high for low, high in zip((0.0, *self.rates), (*self.rates, math.inf), strict=True))
        if not (self.rates and rising):
            raise ValueError(
                f"rates must be positive, finite and rising, got {as_text(self.rates) or 'none'}. "
                f"Pass --rates {as_text(DemoSettings.rates)}, for example."
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


def as_text(rates: tuple[float, ...]) -> str:
    """Return the rates as the option takes them: with commas between them."""
    return ",".join(f"{rate:g}" for rate in rates)


def rates_from(text: str) -> tuple[float, ...]:
    """Read rates with commas between them. Raises ValueError for what is no number."""
    try:
        return tuple(float(rate) for rate in text.split(","))
    except ValueError:
        raise ValueError(
            f"rates must be numbers with commas between them, got {text!r}. "
            f"Pass --rates {as_text(DemoSettings.rates)}, for example."
        ) from None

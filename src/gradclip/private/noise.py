"""`add_noise`: a clipped sum with Gaussian noise, drawn exactly on the integers or by a framework's generator."""

from gradclip.per_example.sensitivity import Sensitivity
from gradclip.typing import Tree


def add_noise(summed: Tree, sensitivity: Sensitivity, noise_multiplier: float, *, rng: object) -> Tree:
    """Return a sum with Gaussian noise of standard deviation noise_multiplier * sensitivity."""
    raise NotImplementedError

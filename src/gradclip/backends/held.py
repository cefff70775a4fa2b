"""Who holds the arrays of a tree: one process and its framework, unless a backend says otherwise."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from gradclip.backends.arrays import Arrays


class HeldByOne:
    """Arrays that are whole, or that the framework treats as if they were."""

    holders: Any = None  # those who hold parts of the arrays, where what is seen here is one part

    def plain(self, leaves: Sequence[Any]) -> bool:
        """Say whether these are plain numbers in host memory, of which no derivative is asked for."""
        return False

    def together(self, arrays: Sequence[Any]) -> Hashable | None:
        """Return what layers have in common whose norms can be one vector; None where each is better taken alone."""
        return None

    def over(self, axis_name: Any) -> Any:
        """Return the backend for arrays that are split over axes of a mesh. Raises TypeError where there are none."""
        raise TypeError(
            f"axis_name names axes of a mesh inside of jax.shard_map, and goes with JAX arrays, got {axis_name!r}. "
            "For arrays of another framework leave it out."
        )

    def where_held(self, arrays: Arrays) -> Callable[..., Any] | None:
        """Return what runs a function on each holder's own parts of the arrays; None if that is not to be done."""
        return None

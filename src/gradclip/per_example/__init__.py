"""From arrays, functions and losses to sums of clipped examples, and what one example can move them."""

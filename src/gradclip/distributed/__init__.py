"""Who holds the parts of a gradient, where it is not one process alone."""

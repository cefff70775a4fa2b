"""A search for an example that moves a private sum by more than promised: hostile batches, and losses with kinks."""

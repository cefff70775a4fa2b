"""What clipping means. Nothing here knows a framework."""

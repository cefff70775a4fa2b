"""Arrays in host memory."""

"""What was recorded as pictures, and as a page."""

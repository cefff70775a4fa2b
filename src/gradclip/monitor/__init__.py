"""What clipping did: numbers, pictures and a page."""

"""`Monitor` records what clipping did, and shows it as numbers, pictures and an HTML page."""

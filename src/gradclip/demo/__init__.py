"""The demo: a recurrent network learns to read digits, with clipping and without."""

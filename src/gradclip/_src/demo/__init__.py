"""The demo: a recurrent network learns to read digits, with and without clipping."""

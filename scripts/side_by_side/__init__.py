"""Every function of the integrated libraries beside ours, on the same inputs, judged in exact arithmetic.

`cases.py` has the inputs, `exact.py` what is right, `verdict.py` what is said of two answers, `bounds.py` the random
inputs, `libraries/` one module for each library, `run.py` brings them together, `page.py` writes the page.
"""

"""Compare every function of the integrated libraries with ours, on the same inputs, in exact arithmetic.

`cases.py` has the inputs, `exact.py` computes the right results, `verdict.py` judges two answers, `libraries/` has one
module per library, `run.py` calls the functions, `page.py` writes the page.
"""

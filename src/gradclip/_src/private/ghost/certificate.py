"""Norms from above for gradients that come in factors, and what their sums may round, with the proof.

Let example i have, for a block of a parameter, the terms left_t (n numbers) and right_t (m numbers), t = 1..T. The
exact sum G = sum_t left_t right_t^T is by definition its gradient there; the numbers are those that one forward and
one backward pass of the framework stored. Write s_t = |left_t| |right_t|, M = sum_t s_t, v = 2**-53 for the unit
roundoff of float64, and g(k) = k*v / (1 - k*v) as in `private/sums/rounding.py`. A parameter may have several
such matrices: b blocks in all of its parts. Their squares add up.

1. The square. q is the sum over t and s of <left_t, left_s> <right_t, right_s>, computed in float64 by conventional
   products, in any order, fused or not. Each inner product is off by at most g(n) |left_t| |left_s|, and g(m) on the
   right. Their product and the sum of T**2 of them round at most T**2 + 1 times more. So
   |q - |G|**2| <= g(n + m + T**2 + 1) sum_ts s_t s_s = g(n + m + T**2 + 1) M**2.
   For an embedding, <left_t, left_s> is 1 or 0: whether both terms are of one row. Between an embedding and a product,
   it is an entry of left_s, read exactly. M itself is computed with a relative error of at most (n + m + T + 8) v.
   With e = 1.1 (n + m + T**2 + b + 16) v, which must be at most 2**-20, q + e M**2 >= |G|**2 for the computed numbers,
   the rounding of this sum included, and that of the sums of q and M**2 over blocks and parts: at most g(b) M**2.
   Numbers of float32 and narrower are exact in float64, and so are the products of two. Four of them cannot leave its
   range. Numbers of float64 are first multiplied by a power of two for each example, so that the largest magnitude on
   either side is in [1/2, 1). What then underflows is less than 2**-1000 in all, and 2**-900 is added to the square.
   A norm above 2**1036 counts as not finite.
2. The floor. For T > 1, terms may cancel within an example, so that M / |G| has no bound, and the rounding of a sum of
   the terms would have none either. Therefore the norm is raised:
       N**2 = sum over the parameters of [q + e M**2 + (T 2**-20)**2 M**2], the last for T > 1 only, rounded up.
   Then N >= |g_i|, and sum (T 2**-20 M)**2 <= N**2. At T = 64 and terms that do not cancel, N is 3e-8 times larger.
   A gradient that was made has one term, itself: T = 1, n = 1 and M = |G|.
3. The weight w of the example follows from N as in `core/coefficient.py`. So |w g_i| <= C, exactly, and w depends
   on example i alone, as N does. Products of w with numbers narrower than float64 must stay in the normal range. So w
   is 0 for those below 2**-700, and at most 2**700. Numbers that were scaled are below 1: what underflows in a product
   of theirs is what step 3 of `private/sums/rounding.py` counts.
4. The sum. It adds up w left_t right_t^T in float64, K = examples * T terms in any order: each coordinate takes part in
   at most K + 2 roundings. In a parameter it is off by at most g(K + 2) sum_i w_i M_i. For T > 1,
   w_i M_i <= 2**20 / T * w_i (T 2**-20 M_i), and (K + 2) / T <= examples + 2. By Minkowski's inequality over the
   parameters, the sum of all is off by at most
       1.01 (examples + 2) 2**-33 examples C,
   which depends on neither T nor shapes. Where T = 1 everywhere, 2**-33 becomes v. Twice that is added to the rounding
   of the sensitivity: there are two sums.
5. Assumed, as for every batched gradient: an example's terms do not depend on the other examples. So batches have one
   shape, and examples keep their places. Sums in float32 would be proven for T = 1 only, with 2**-24 in place of v;
   devices without float64 make the gradient of each example instead.

The inequality of step 1 is checked by machine: proofs/ghost.py.

Ghost norms are from Goodfellow 2015, "Efficient Per-Example Gradient Computations", and Li et al. 2022, "Large Language
Models Can Be Strong Differentially Private Learners". Taking norm and sum from the same stored terms is the
book-keeping of Bu et al. 2023, "Differentially Private Optimization on Large Model at Small Cost".
"""

from fractions import Fraction

_UNIT = 2.0**-53
_FLOOR = 2.0**-20
_LARGEST_ERROR = 2.0**-20
_RAISED = 1.1
ADDED = 2.0**-900
"""What is added to the square of a norm whose terms were scaled."""
SMALLEST_WEIGHT, LARGEST_WEIGHT = 2.0**-700, 2.0**700
"""The range of weights of numbers narrower than float64. Smaller weights become 0, larger ones the largest."""


def error_of_square(rows: int, columns: int, terms: int, matrices: int = 1) -> float | None:
    """Return e of step 1 for a parameter with so many blocks and parts; None if it is too large for a proof."""
    error = _RAISED * (rows + columns + terms**2 + matrices + 16) * _UNIT
    return error if error <= _LARGEST_ERROR else None


def raised_by_floor(terms: int) -> float:
    """Return (T 2**-20)**2, which times M**2 is added to the square; 0 for one term."""
    return 0.0 if terms == 1 else (terms * _FLOOR) ** 2


def relative_error(parameters: int) -> float:
    """Return a bound on the relative error of N: of the sum over so many parameters, and of the root.

    It exceeds the error by more than 4 v, as `core/coefficient.py` asks.
    """
    return (parameters + 16) * _UNIT


def rounding_of_sum(examples: int, *, cancels: bool) -> Fraction:
    """Return what step 4 adds to the distance of two sums, in units of examples * C.

    `cancels`: a parameter may have more than one term in an example.
    """
    unit = Fraction(1, 2**33) if cancels else Fraction(1, 2**53)
    return 2 * Fraction(101, 100) * (examples + 2) * unit

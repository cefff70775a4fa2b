// The squared norms of sums of outer products, from inner products.
#pragma once

#include "arrays.hpp"

// N sums of T outer products of rows.
struct GramShape {
  int64_t sums;
  int64_t terms;
  int64_t rows;
  int64_t columns;
};

// For each n, with left (N, T, rows) and right (N, T, columns), both real, computed in double:
//   squares[n] = sum over t and s of <left_t, left_s> <right_t, right_s>, the square of the norm of
//                sum over t of left_t^T right_t;
//   sizes[n] = sum over t of |left_t| |right_t|.
// Both are NaN if an element is not finite, or if float64 overflows. What is written for one n depends on it alone, and
// the bits are the same in every variant and for every number of threads.
//
// Errors, with v = 2**-53, gam(k) = k v / (1 - k v) and k = rows + columns + 2 T + 8, unless numbers leave the range of
// double, which products of four narrower numbers cannot:
//   |squares[n] - exact| <= gam(k) sizes^2,   |sizes[n] - exact| <= gam(k) sizes,   sizes the exact one.
// Proof. Each inner product is a chain of `rows` (or `columns`) fused multiply-adds, each with one rounding; so it is off
// by at most gam(rows) |left_t| |left_s|. (For T = 1, each term of a sum of squares goes through its own rounding, at most
// `rows` - 1 additions that are not to zero, and four of the chunks.) The product of two of them is rounded once and goes
// through at most T / 16 + 5 additions of its row and T of all rows; doubling is exact. So (Higham 2002, lemma 3.1) it
// arrives with a factor 1 + e, |e| <= gam(k), times at most |left_t| |left_s| |right_t| |right_s|, and these add up to
// sizes^2. Sizes: inner products with themselves have a relative error of gam(rows); two square roots halve that and round
// once each; then there are one product and T additions, none of negative numbers.
void gram_squares(const Arrays& left, const Arrays& right, GramShape shape, double* squares, double* sizes, int threads);

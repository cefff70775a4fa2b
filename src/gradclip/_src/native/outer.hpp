// Weighted sums of outer products.
#pragma once

#include "arrays.hpp"

// The totals are `blocks` matrices, each of this size.
struct OuterShape {
  int64_t blocks;
  int64_t rows;
  int64_t columns;
};

// totals[g] = sum over k of weight[k] * left[g, k]^T right[g, k]. `left` (blocks, K, rows) and `right` (blocks, K,
// columns) are real, each of one dtype; without `left`, it is ones, with one row. K is a multiple of the number of
// weights: each is for equally many k, one after another. A k with weight 0 adds nothing, whatever its rows hold.
//
// Each total is computed in double, in the order of k. A term goes through at most K + 2 roundings: of weight times left
// (or times right without `left`), and of each addition, with which the other product is fused. This leaves out numbers
// beyond the range of double, where they become infinite, or below it, where each rounding may be off by 2**-1075. The
// bits are the same in every variant and for every number of threads, and do not change if a k with weight 0 is left out.
void outer_sums(const Arrays* left, const Arrays& right, const Arrays& weights, const Arrays& totals, OuterShape shape,
                int threads);

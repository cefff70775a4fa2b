// Arrays cut into rows, each measured and scaled separately.
#pragma once

#include "arrays.hpp"

// The number of equally long rows in each array. Rows are numbered across all arrays, in order.
using RowCounts = std::vector<int64_t>;

// Writes the sum of magnitudes (`p` 1) or squares (`p` 2) of each row. Half types are added in double.
void sum_rows(const Arrays& arrays, const RowCounts& counts, double p, double* sums, int threads);

// Writes each scaled row to its place in `to`, which may be the arrays themselves. The table has five lines with one
// entry per row: whether to keep the row (1) or scale it (0); the two factors for float64 rows; the two for all others.
void scale_rows(const Arrays& arrays, const Arrays& to, const RowCounts& counts, const double* table, int threads);

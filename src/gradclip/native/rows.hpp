// Arrays cut into rows, each of which is measured and scaled by itself.
#pragma once

#include "arrays.hpp"

// Each array is cut into so many rows of one length. Rows are counted through, array by array.
using RowCounts = std::vector<int64_t>;

// Writes the sum of the magnitudes (`p` 1) or squares (`p` 2) of each row. Those of half types are added in double.
void sum_rows(const Arrays& arrays, const RowCounts& counts, double p, double* sums, int threads);

// Scales each row where it lies. The table has five lines with an entry for each row: 1 where it is not to be written,
// else 0; the two factors of a row of float64; those of any other.
void scale_rows(const Arrays& arrays, const RowCounts& counts, const double* table, int threads);

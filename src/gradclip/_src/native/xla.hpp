// The reductions as functions that CPU programs compiled by XLA call.
#pragma once

#include "xla_ffi.hpp"

// Arguments: any number of arrays. Their leading axes, as many as a result has, are rows: each row of all arrays gives
// one float64 number in each result. An axis of length 1 means equal rows.

// Attributes: p, enough and threads. Results: the sum of (|x| / divisor)**p, and the divisor. The divisor is 1 if the
// sum is then finite and above `enough`, or if x is non-finite. Otherwise it is the largest magnitude.
xla_ffi::Error* xla_power_sums(xla_ffi::Call* call);

// Arguments before the arrays: a Weighing as five numbers, and for each example 0, or NaN to leave it out. Attribute:
// threads. Results: each example's sum of squares, and the weighted sums of all examples, array by array.
xla_ffi::Error* xla_add_examples(xla_ffi::Call* call);

// Attribute: threads. Results: the largest magnitude, NaN if any is NaN; and the smallest, NaN if any is non-finite.
xla_ffi::Error* xla_extremes(xla_ffi::Call* call);

// Results: each entry of each vector, in order.
xla_ffi::Error* xla_entries(xla_ffi::Call* call);

// Arguments: left (blocks, K, rows), which may be missing, right (blocks, K, columns), and the weights. Attribute:
// threads. Result: the float64 totals (blocks, rows, columns) of `outer_sums`.
xla_ffi::Error* xla_outer_sums(xla_ffi::Call* call);

// Arguments: left (N, T, rows) and right (N, T, columns). Attribute: threads. Results: the squares and the sizes of
// `gram_squares`, N numbers each.
xla_ffi::Error* xla_gram_squares(xla_ffi::Call* call);

// The reductions as functions that programs compiled by XLA for the CPU call.
#pragma once

#include "xla_ffi.hpp"

// Arguments are any number of arrays. Their leading axes, as many as a result has, count rows: each row of all arrays
// gives one number of each result (float64). An axis of length 1 stands for equal rows.

// Attributes p, enough and threads. Results: the sum of (|x| / divisor)**p, and the divisor. It is 1 if the sum is then
// finite and above `enough`, or x is not finite; otherwise it is the largest magnitude.
xla_ffi::Error* xla_power_sums(xla_ffi::Call* call);

// Arguments, before the arrays: a Weighing as five numbers, and for each example 0, or NaN to leave it out. Attribute
// threads. Results: the sum of squares of each example, and the weighted sums of them all, array by array.
xla_ffi::Error* xla_add_examples(xla_ffi::Call* call);

// Attribute threads. Results: the largest magnitude, NaN where one is NaN, and the smallest, NaN where one is not
// finite.
xla_ffi::Error* xla_extremes(xla_ffi::Call* call);

// Results: each entry of each of the vectors, in turn.
xla_ffi::Error* xla_entries(xla_ffi::Call* call);

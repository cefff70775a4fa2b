// Batches of examples, each weighed by its own norm and added up, in a single pass.
#pragma once

#include "arrays.hpp"

// The weight of an example. With `upper` = norm * inflate + offset, it is `kept` if `upper` is at most `keep_up_to`,
// else numerator / upper.
struct Weighing {
  double inflate;
  double offset;
  double keep_up_to;
  double kept;
  double numerator;
};

// The arrays' leading axis is the examples. On entry, `squares` is NaN for examples to leave out and 0 for all others;
// for these, their sum of squares is written to it. Each example, times its weight, is added to `totals`, which has one
// number for each element of an example, array by array (two for complex elements). An example with a non-finite sum of
// squares adds nothing.
void add_examples(const Arrays& arrays, std::size_t examples, const Weighing& weighing, double* squares, double* totals,
                  int threads);

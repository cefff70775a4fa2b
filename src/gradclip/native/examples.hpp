// Batches of examples: each is weighed by its own norm, and all are added up, in one reading.
#pragma once

#include "arrays.hpp"

// What an example is multiplied by. With `upper` = norm * inflate + offset it is `kept` where that is at most
// `keep_up_to`, else numerator / upper.
struct Weighing {
  double inflate;
  double offset;
  double keep_up_to;
  double kept;
  double numerator;
};

// The arrays' leading axis counts examples. At first `squares` holds NaN for an example that is to be left out, and 0
// for any other, whose sum of squares is then written there. Each example, times its weight, is added to `totals`: one
// number for each element of an example, array by array, of complex arrays the parts. An example whose sum of squares
// is not finite adds nothing.
void add_examples(const Arrays& arrays, std::size_t examples, const Weighing& weighing, double* squares, double* totals,
                  int threads);

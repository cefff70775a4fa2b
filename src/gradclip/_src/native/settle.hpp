// What one look at norms decides: which of them keep their elements, and the factors of the others.
#pragma once

#include "rows.hpp"

// How norms follow from sums of powers, and what decides them. `errors` bounds their relative errors: one for each group
// of arrays, or for each array of rows. A sum above `enough` has lost nothing to underflow. `limits` has one threshold
// for all norms, or one for each. The norms are written to `norms`, and to `table` what `scale_rows` and
// `Arrays::scale_groups` read.
struct Question {
  double p;
  double enough;
  const std::vector<double>& errors;
  const Arrays& limits;
  const Arrays& norms;
  const Arrays& table;
};

enum class Settled { open, kept, scaled };

// The result is `open` if the error bound does not decide a norm: then neither the norms nor the table are complete.
// Throws if these have the wrong size.
Settled settle_groups(const Arrays& arrays, const std::vector<std::size_t>& group_of, const Question& asked,
                      bool in_float, int threads);
Settled settle_rows(const Arrays& arrays, const RowCounts& counts, const Question& asked, int threads);

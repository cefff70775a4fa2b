// Adds up the chunks' sums.
#pragma once

#include <cmath>

#include "kernels.hpp"

// Adds in the given order and accumulates the rounding errors separately (Neumaier 1974), so that the error does not
// grow with the number of chunks.
class SumInOrder {
 public:
  void add(const Sum& part) {
    const double total = whole_.value + part.value;
    const bool larger = whole_.value >= part.value;  // no absolute values needed: sums of powers are not negative
    errors_ += larger ? (whole_.value - total) + part.value : (part.value - total) + whole_.value;
    whole_.value = total;
    whole_.nonfinite += part.nonfinite;
  }
  // The errors of an infinite sum are NaN.
  Sum sum() const { return {std::isfinite(whole_.value) ? whole_.value + errors_ : whole_.value, whole_.nonfinite}; }

 private:
  Sum whole_ = {0.0, 0};
  double errors_ = 0.0;
};

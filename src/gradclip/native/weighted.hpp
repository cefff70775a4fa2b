// Sums of rows, each times a weight. Each variant of the kernels compiles its own copy.
#pragma once

#include <algorithm>

#include "formats.hpp"
#include "kernels.hpp"

namespace {

// Products are rounded before they are added, so that every variant gives the same bits.
template <class Format, int kGroups>
inline void add_lanes(const void* const* rows, const double* weights, int64_t count, int64_t at, double* total) {
  Lanes<double> sums[kGroups];
  for (int group = 0; group < kGroups; ++group) sums[group] = Lanes<double>::load(total + at + group * kLanes);
  for (int64_t row = 0; row < count; ++row) {
    const auto* x = static_cast<const typename Format::Raw*>(rows[row]) + at;
    const Vector<double> weight = Vector<double>{} + weights[row];
    for (int group = 0; group < kGroups; ++group) {
      const Lanes<double> terms = widened(Format::load_in_order(x + group * kLanes));
      for (int i = 0; i < Lanes<double>::kVectors; ++i) sums[group].v[i] += terms.v[i] * weight;
    }
  }
  for (int group = 0; group < kGroups; ++group) sums[group].store(total + at + group * kLanes);
}

template <class Format>
void add_rows_kernel(const void* const* rows, const double* weights, int64_t count, double* total, int64_t columns) {
  constexpr int kGroups = sizeof(Vector<double>) == 32 ? 2 : 1;
  int64_t at = 0;
  for (; at + kGroups * kLanes <= columns; at += kGroups * kLanes) {
    add_lanes<Format, kGroups>(rows, weights, count, at, total);
  }
  for (; at + kLanes <= columns; at += kLanes) add_lanes<Format, 1>(rows, weights, count, at, total);
  if (at == columns) return;
  double last[kLanes] = {};
  std::copy(total + at, total + columns, last);
  for (int64_t row = 0; row < count; ++row) {
    typename Format::Raw padded[kLanes] = {};
    const auto* x = static_cast<const typename Format::Raw*>(rows[row]);
    std::copy(x + at, x + columns, padded);
    const void* pointer = padded;
    add_lanes<Format, 1>(&pointer, weights + row, 1, 0, last);
  }
  std::copy_n(last, columns - at, total + at);
}

}  // namespace

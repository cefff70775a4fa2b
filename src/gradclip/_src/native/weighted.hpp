// Weighted sums of rows. Each variant of the kernels compiles its own copy.
#pragma once

#include <algorithm>

#include "formats.hpp"
#include "kernels.hpp"

namespace {

template <class Raw>
inline const Raw* row_at(Rows rows, int64_t row, int64_t at) {
  return static_cast<const Raw*>(rows.data[row]) + at;
}

// Into the second-level cache: the first has no room for them next to the rows being added.
template <class Raw, int kElements>
inline void fetch(Rows rows, int64_t at) {
  constexpr int64_t kLine = kCacheLine / sizeof(Raw);
  for (int64_t row = 0; row < rows.count; ++row) {
    for (int64_t i = 0; i < kElements; i += kLine) __builtin_prefetch(row_at<Raw>(rows, row, at + i), 0, 2);
  }
}

// Products are rounded before they are added, so every variant gives the same bits.
template <class Format, int kGroups>
inline void add_lanes(Rows rows, const double* weights, int64_t at, double* total) {
  using Raw = typename Format::Raw;
  Lanes<double> sums[kGroups];
  for (int group = 0; group < kGroups; ++group) sums[group] = Lanes<double>::load(total + at + group * kLanes);
  for (int64_t row = 0; row < rows.count; ++row) {
    const Raw* x = row_at<Raw>(rows, row, at);
    const Vector<double> weight = Vector<double>{} + weights[row];
    for (int group = 0; group < kGroups; ++group) {
      const Lanes<double> terms = widened(Format::load_in_order(x + group * kLanes));
      for (int i = 0; i < Lanes<double>::kVectors; ++i) sums[group].v[i] += terms.v[i] * weight;
    }
  }
  for (int group = 0; group < kGroups; ++group) sums[group].store(total + at + group * kLanes);
}

template <class Format>
void add_rows_kernel(Rows rows, const double* weights, Rows next, double* total, int64_t columns) {
  using Raw = typename Format::Raw;
  constexpr int kGroups = sizeof(Vector<double>) == 32 ? 2 : 1;
  int64_t at = 0;
  for (; at + kGroups * kLanes <= columns; at += kGroups * kLanes) {
    fetch<Raw, kGroups * kLanes>(next, at);
    add_lanes<Format, kGroups>(rows, weights, at, total);
  }
  for (; at + kLanes <= columns; at += kLanes) add_lanes<Format, 1>(rows, weights, at, total);
  if (at == columns) return;
  // Pad the rest of each row with zeros: neither rows nor totals may be read past their end.
  double last[kLanes] = {};
  std::copy(total + at, total + columns, last);
  for (int64_t row = 0; row < rows.count; ++row) {
    Raw padded[kLanes] = {};
    const Raw* x = row_at<Raw>(rows, row, 0);
    std::copy(x + at, x + columns, padded);
    const void* pointer = padded;
    add_lanes<Format, 1>({&pointer, 1}, weights + row, 0, last);
  }
  std::copy_n(last, columns - at, total + at);
}

}  // namespace

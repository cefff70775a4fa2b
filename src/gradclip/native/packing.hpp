// Copies of matrices in double, laid out for products. Each variant of the kernels compiles its own copy.
#pragma once

#include <algorithm>

#include "formats.hpp"
#include "kernels.hpp"
#include "reductions.hpp"

namespace {

// Rows read together: as many streams as processors follow.
constexpr int64_t kStreams = 8;

template <class Format>
inline Lanes<double> widened_at(const typename Format::Raw* x, int64_t at, int64_t end) {
  if (at + kLanes <= end) return widened(Format::load_in_order(x + at));
  typename Format::Raw padded[kLanes] = {};
  std::copy(x + at, x + end, padded);
  return widened(Format::load_in_order(padded));
}

// Each row writes 16 numbers, of which the next row overwrites those beyond the width.
template <class Format>
void pack_kernel(Rows rows, Columns columns, const double* weights, int64_t width, double* to) {
  for (int64_t first = 0; first < rows.count; first += kStreams) {
    const int64_t last = std::min(rows.count, first + kStreams);
    double* panel = to;
    for (int64_t at = columns.begin; at < columns.end; at += width, panel += rows.count * width) {
      double last_of_panel[kLanes];
      for (int64_t row = first; row < last; ++row) {
        const auto* x = static_cast<const typename Format::Raw*>(rows.data[row]);
        Lanes<double> lanes = widened_at<Format>(x, at, columns.end);
        if (weights) {
          for (auto& vector : lanes.v) vector *= weights[row];
        }
        lanes.store(row + 1 < last ? panel + row * width : last_of_panel);
      }
      std::copy_n(last_of_panel, width, panel + (last - 1) * width);
    }
  }
}

template <class Format>
void pack_across_kernel(Rows rows, Columns columns, int64_t width, double* to) {
  for (int64_t first = 0; first < rows.count; first += width) {
    const int64_t count = std::min(width, rows.count - first);
    for (int64_t at = columns.begin; at < columns.end; at += kLanes) {
      const int64_t filled = std::min<int64_t>(kLanes, columns.end - at);
      double square[kLanes][kLanes] = {};
      for (int64_t row = 0; row < count; ++row) {
        const auto* x = static_cast<const typename Format::Raw*>(rows.data[first + row]);
        widened_at<Format>(x, at, columns.end).store(square[row]);
      }
      for (int64_t column = 0; column < filled; ++column, to += width) {
        for (int64_t row = 0; row < width; ++row) to[row] = square[row][column];
      }
    }
  }
}

// Products are rounded before they are added, so every variant gives the same bits.
double dot_kernel(const double* x, const double* y, int64_t count) {
  Lanes<double> sums = {};
  for (int64_t at = 0; at < count; at += kLanes) {
    const Lanes<double> a = widened_at<Float64>(x, at, count), b = widened_at<Float64>(y, at, count);
    for (int i = 0; i < Lanes<double>::kVectors; ++i) sums.v[i] += a.v[i] * b.v[i];
  }
  return sum_of_lanes(sums);
}

}  // namespace

// Copies of matrices in double, laid out for products. Each variant of the kernels compiles its own copy.
#pragma once

#include <algorithm>

#include "formats.hpp"
#include "kernels.hpp"
#include "reductions.hpp"

namespace {

// Rows read together: as many streams as processors follow.
constexpr int64_t kStreams = 8;

// The first 16 elements, of which there are `count`, and zeros after them.
template <class Format>
inline Lanes<double> widened_at(const typename Format::Raw* x, int64_t count) {
  if (count >= kLanes) return widened(Format::load_in_order(x));
  typename Format::Raw padded[kLanes] = {};
  std::copy_n(x, count, padded);
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
        Lanes<double> lanes = widened_at<Format>(x + at, columns.end - at);
        if (weights) {
          for (auto& vector : lanes.v) vector *= weights[row];
        }
        lanes.store(row + 1 < last ? panel + row * width : last_of_panel);
      }
      std::copy_n(last_of_panel, width, panel + (last - 1) * width);
    }
  }
}

constexpr int kSide = Lanes<double>::kSize;

inline void transpose(Vector<double> (&x)[kSide]) {
#if defined(__AVX2__)
  const __m256d a = _mm256_unpacklo_pd((__m256d)x[0], (__m256d)x[1]), b = _mm256_unpackhi_pd((__m256d)x[0], (__m256d)x[1]);
  const __m256d c = _mm256_unpacklo_pd((__m256d)x[2], (__m256d)x[3]), d = _mm256_unpackhi_pd((__m256d)x[2], (__m256d)x[3]);
  x[0] = (Vector<double>)_mm256_permute2f128_pd(a, c, 0x20);
  x[1] = (Vector<double>)_mm256_permute2f128_pd(b, d, 0x20);
  x[2] = (Vector<double>)_mm256_permute2f128_pd(a, c, 0x31);
  x[3] = (Vector<double>)_mm256_permute2f128_pd(b, d, 0x31);
#else
  const Vector<double> first = {x[0][0], x[1][0]};
  x[1] = Vector<double>{x[0][1], x[1][1]};
  x[0] = first;
#endif
}

// Writes 16 columns, of which there are `count`, of some rows, column by column.
template <class Format>
inline void pack_columns(Rows rows, int64_t at, int64_t count, int64_t width, double* to) {
  using Raw = typename Format::Raw;
  static constexpr Raw kZeros[kLanes] = {};
  for (int64_t first = 0; first < rows.count; first += kSide, to += kSide) {
    Lanes<double> lanes[kSide];
    for (int64_t i = 0; i < kSide; ++i) {
      const Raw* x = first + i < rows.count ? static_cast<const Raw*>(rows.data[first + i]) + at : kZeros;
      lanes[i] = widened_at<Format>(x, count);
    }
    for (int i = 0; i < Lanes<double>::kVectors; ++i) {
      Vector<double> square[kSide];
      for (int row = 0; row < kSide; ++row) square[row] = lanes[row].v[i];
      transpose(square);
      for (int column = 0; column < kSide; ++column) store_to(to + (i * kSide + column) * width, square[column]);
    }
  }
}

template <class Format>
void pack_across_kernel(Rows rows, Columns columns, int64_t width, double* to) {
  for (int64_t first = 0; first < rows.count; first += width) {
    const Rows panel = {rows.data + first, std::min(width, rows.count - first)};
    int64_t at = columns.begin;
    for (; at + kLanes <= columns.end; at += kLanes, to += kLanes * width) {
      pack_columns<Format>(panel, at, kLanes, width, to);
    }
    if (at == columns.end) continue;
    double last[kLanes * kLanes] = {};
    pack_columns<Format>(panel, at, columns.end - at, width, last);
    to = std::copy_n(last, (columns.end - at) * width, to);
  }
}

// Products are rounded before they are added, so every variant gives the same bits.
double dot_kernel(const double* x, const double* y, int64_t count) {
  Lanes<double> sums = {};
  for (int64_t at = 0; at < count; at += kLanes) {
    const auto a = Lanes<double>::load(x + at), b = Lanes<double>::load(y + at);
    for (int i = 0; i < Lanes<double>::kVectors; ++i) sums.v[i] += a.v[i] * b.v[i];
  }
  return sum_of_lanes(sums);
}

}  // namespace

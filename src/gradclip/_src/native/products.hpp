// Products of matrices in double. Each variant of the kernels compiles its own copy.
#pragma once

#include <algorithm>
#include <cmath>

#include "formats.hpp"
#include "kernels.hpp"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

#if defined(__FMA__) || defined(__aarch64__)
constexpr bool kFuses = true;
#else
constexpr bool kFuses = false;
#endif

// Without an instruction for it, the C library's function gives the same bits, slowly.
inline Vector<double> fused(Vector<double> x, Vector<double> y, Vector<double> sum) {
#if defined(__FMA__)
  return (Vector<double>)_mm256_fmadd_pd((__m256d)x, (__m256d)y, (__m256d)sum);
#elif defined(__aarch64__)
  return (Vector<double>)vfmaq_f64((float64x2_t)sum, (float64x2_t)x, (float64x2_t)y);
#else
  for (int lane = 0; lane < Lanes<double>::kSize; ++lane) sum[lane] = std::fma(x[lane], y[lane], sum[lane]);
  return sum;
#endif
}

#if defined(__AVX512F__)
using Wide = Vector<double, 64>;
inline Wide fused(Wide x, Wide y, Wide sum) { return (Wide)_mm512_fmadd_pd((__m512d)x, (__m512d)y, (__m512d)sum); }
// The rows and vectors of sums that fit in the registers, and the fewest rows that keep them busy.
constexpr int kSumRows = 12, kSumVectors = 2, kFewRows = 4;
#elif defined(__AVX2__) || defined(__aarch64__)
using Wide = Vector<double>;
constexpr int kSumRows = 6, kSumVectors = 64 / kBytes, kFewRows = 3;
#else
using Wide = Vector<double>;
constexpr int kSumRows = 3, kSumVectors = 2, kFewRows = 1;
#endif
constexpr int kSumColumns = kSumVectors * static_cast<int>(sizeof(Wide) / sizeof(double));
static_assert(kTileRows % kSumRows == 0 && kTileColumns % kSumColumns == 0);

// `add`: the totals hold earlier sums. Each sum is one chain of fused multiply-adds in the order of k, so that no way of
// cutting a matrix into tiles and blocks changes its bits.
template <int kRows, bool add>
inline void multiply_part(const double* left, const double* right, int64_t depth, double* totals, int64_t stride) {
  constexpr int kSize = sizeof(Wide) / sizeof(double);
  Wide sums[kRows][kSumVectors] = {};
  if constexpr (add) {
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kSumVectors; ++j) sums[i][j] = load_from<Wide>(totals + i * stride + j * kSize);
    }
  }
  // They are written last, and may not be in cache.
  for (int i = 0; i < kRows; ++i) {
    __builtin_prefetch(totals + i * stride, 1);
    __builtin_prefetch(totals + i * stride + kSumColumns - 1, 1);
  }
  for (int64_t k = 0; k < depth; ++k, left += kTileRows, right += kTileColumns) {
    Wide row[kSumVectors];
    for (int j = 0; j < kSumVectors; ++j) row[j] = load_from<Wide>(right + j * kSize);
    for (int i = 0; i < kRows; ++i) {
      const Wide factor = left[i] - Wide{};  // no instruction; adding zero would be one, because it changes -0
      for (int j = 0; j < kSumVectors; ++j) sums[i][j] = fused(factor, row[j], sums[i][j]);
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kSumVectors; ++j) store_to(totals + i * stride + j * kSize, sums[i][j]);
  }
}

template <int kRows>
inline void multiply_rows(const double* left, const double* right, int64_t depth, double* totals, int64_t stride,
                          bool add) {
  const auto part = add ? multiply_part<kRows, true> : multiply_part<kRows, false>;
  for (int j = 0; j < kTileColumns; j += kSumColumns) part(left, right + j, depth, totals + j, stride);
}

void multiply_kernel(const double* left, const double* right, int64_t depth, double* totals, int64_t stride,
                     int64_t rows, bool add) {
  for (int64_t i = 0; i < rows; i += kSumRows) {
    const auto multiply = rows - i <= kFewRows ? multiply_rows<kFewRows> : multiply_rows<kSumRows>;
    multiply(left + i, right, depth, totals + i * stride, stride, add);
  }
}

}  // namespace

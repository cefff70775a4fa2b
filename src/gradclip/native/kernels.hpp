// The function table of each variant of the kernels.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

enum class Dtype : int { float32, float64, float16, bfloat16, complex64, complex128 };
constexpr int kDtypes = 6;
constexpr std::array<std::string_view, kDtypes> kDtypeNames = {"float32",  "float64",   "float16",
                                                               "bfloat16", "complex64", "complex128"};
constexpr std::array<int64_t, kDtypes> kItemSizes = {4, 8, 2, 2, 8, 16};

constexpr bool is_complex(Dtype dtype) { return dtype >= Dtype::complex64; }

// Sums are computed chunk by chunk, and the chunks' sums are added in order: the same bits for any number of threads.
constexpr int64_t kChunk = 65536;
constexpr int64_t kAdditions = 85;
constexpr double kLargestPower = 64.0;

struct Sum {
  double value;
  int64_t nonfinite;
};

class ExactSum;

struct Extremes {
  double largest;
  double smallest;
  int64_t nonfinite;
};

// `count` rows, starting at the same column.
struct Rows {
  const void* const* data;
  int64_t count;
};

// Function pointers, so that one library holds the kernels for all processors and tests can pick a variant. Each
// function processes one chunk of one dtype. Counts are in elements, complex ones too unless stated otherwise.
struct Kernels {
  // `in_float`: squares of half types may be added in float, four at a time.
  Sum (*sum)(const void* data, int64_t count, double p, double divisor, bool in_float);
  Extremes (*extremes)(const void* data, int64_t count);
  // Adds the magnitudes (`p` 1) or squares (`p` 2) of finite elements.
  void (*add_exactly)(const void* data, int64_t count, int p, ExactSum& into);
  void (*scale)(const void* from, void* to, int64_t count, double first, double second);
  void (*clamp)(void* data, int64_t count, double bound);
  // Adds `columns` elements of each row, times the row's weight, to `total`. Meanwhile, fetches the rows of `next` into
  // cache.
  void (*add_rows)(Rows rows, const double* weights, Rows next, double* total, int64_t columns);
};

using KernelTable = std::array<Kernels, kDtypes>;

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
#endif

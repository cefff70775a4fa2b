// The table of functions that each variant of the kernels fills.
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

// Sums are taken chunk by chunk, and the chunks' sums in their order: the same bits on any number of threads.
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

// Rows at one column: as many as `count`.
struct Rows {
  const void* const* data;
  int64_t count;
};

// Pointers to functions, so that one library holds the kernels for all processors and a test can pick a variant.
// Functions of one chunk of one dtype; counts are in elements, of complex numbers too unless said otherwise.
struct Kernels {
  // `in_float`: squares of half types may be added four at a time in float.
  Sum (*sum)(const void* data, int64_t count, double p, double divisor, bool in_float);
  Extremes (*extremes)(const void* data, int64_t count);
  // Adds the magnitudes (`p` 1) or squares (`p` 2) of finite elements.
  void (*add_exactly)(const void* data, int64_t count, int p, ExactSum& into);
  void (*scale)(const void* from, void* to, int64_t count, double first, double second);
  void (*clamp)(void* data, int64_t count, double bound);
  // Adds `columns` elements of each of the rows, times the row's weight, to `total`; meanwhile those of `next` are
  // fetched into cache.
  void (*add_rows)(Rows rows, const double* weights, Rows next, double* total, int64_t columns);
};

using KernelTable = std::array<Kernels, kDtypes>;

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
#endif

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

// Columns from `begin` up to `end`.
struct Columns {
  int64_t begin;
  int64_t end;
};

// Products of matrices are computed in tiles of this size, each from a panel of each matrix.
constexpr int64_t kTileRows = 12, kTileColumns = 16;

// Noise of standard deviation `scale`, and how attempts are made: see private/noise/discrete.py.
struct NoiseTarget {
  double scale;
  double shift;
  int bits;
};

// How many attempts were made, and how many sums they gave.
struct NoiseProgress {
  int64_t used;
  int64_t filled;
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
  // Writes `left` minus `right` in double: each difference is rounded once.
  void (*subtract)(const void* left, const void* right, double* to, int64_t count);
  void (*clamp)(void* data, int64_t count, double bound);
  // Adds `columns` elements of each row, times the row's weight, to `total`. Meanwhile, fetches the rows of `next` into
  // cache.
  void (*add_rows)(Rows rows, const double* weights, Rows next, double* total, int64_t columns);
  // Copies columns in double, each row times its weight if there are weights: in panels of `width` (at most 16) columns,
  // one after another, each row by row. The last panel is padded with zeros.
  void (*pack)(Rows rows, Columns columns, const double* weights, int64_t width, double* to);
  // The same for the transposed matrix: in panels of `width` rows, each column by column. The last panel is padded with
  // whatever was there.
  void (*pack_across)(Rows rows, Columns columns, int64_t width, double* to);
  // Computes the first `rows` rows of a tile of the product of two panels, which have `depth` rows, and adds it to what is
  // there (`add`) or overwrites that. What it makes of the other rows is not defined.
  void (*multiply)(const double* left, const double* right, int64_t depth, double* totals, int64_t stride, int64_t rows,
                   bool add);
  // The count is a multiple of 16.
  double (*dot)(const double* x, const double* y, int64_t count);
  // Adds noise to `values` in order, from the words of attempts, until there are no more of one of them, or until an
  // attempt that only exact arithmetic can decide. `sums` is other memory.
  NoiseProgress (*noise)(const NoiseTarget& target, const uint64_t* first, const uint64_t* second, int64_t attempts,
                         const int64_t* values, int64_t* sums, int64_t count);
  // Whether there is an instruction for what `multiply` computes.
  bool fuses;
};

using KernelTable = std::array<Kernels, kDtypes>;

extern const KernelTable kBaselineKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
// All else is as fast with AVX2.
extern const decltype(Kernels::multiply) kAvx512Multiply;
extern const decltype(Kernels::noise) kAvx512Noise;
#endif

// A list of arrays in host memory, and operations on all of them together.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "exact_sum.hpp"
#include "kernels.hpp"
#include "parallel.hpp"
#include "sum_in_order.hpp"

// Two factors to multiply by, one after the other, each in the format of the product.
struct Factors {
  double first;
  double second;
};

class Arrays {
 public:
  void add(void* data, int64_t count, Dtype dtype);

  bool only_halves() const;
  const std::vector<Span>& spans() const { return spans_; }
  std::size_t size() const { return spans_.size(); }
  int64_t count() const;
  std::vector<int64_t> counts() const;
  std::vector<std::string> dtypes() const;

  // Whether any two of the arrays and the other stretches of memory (begin, end) overlap.
  using Stretch = std::pair<std::uintptr_t, std::uintptr_t>;
  bool overlap(std::vector<Stretch> others) const;

  // `in_float`: squares of half types may be added in float, four at a time.
  Sum sum(double p, double divisor, bool in_float, int threads) const;
  Extremes extremes(int threads) const;

  // The exact sum of magnitudes (`p` 1, real numbers only) or of squares (`p` 2). Throws if an element is not finite.
  ExactSum exact_sum(int p, int threads) const;

  // The same for each of `rows` rows: first the arrays of the first row, then those of the second, and so on. Each row
  // has a divisor. A divisor of 0 skips the row.
  std::vector<Sum> row_sums(std::size_t rows, double p, const std::vector<double>& divisors, bool in_float,
                            int threads) const;
  std::vector<Extremes> row_extremes(std::size_t rows, int threads) const;

  // The sum of each group of arrays. `group_of` has each array's group number.
  std::vector<Sum> group_sums(const std::vector<std::size_t>& group_of, std::size_t groups, double p, bool in_float,
                              int threads) const;

  // The sum of each array, followed by the sum of all, bit-identical to `sum`.
  std::vector<Sum> sums_of_each(double p, bool in_float, int threads) const;

  // Writes each array to the array of `to` with the same index: unchanged (`keep`) or scaled by its group's factors.
  struct Scaling {
    bool keep;
    Factors wide, narrow;
  };
  void scale_groups(const Arrays& to, const std::vector<std::size_t>& group_of, const std::vector<Scaling>& scalings,
                    int threads) const;

  // Writes each array to the array of `to` with the same index, scaled: float64 arrays by `wide`, others by `narrow`.
  // `to` may be these arrays themselves.
  void scale(const Arrays& to, Factors wide, Factors narrow, int threads) const;
  void fill_zero(int threads) const;
  void clamp(double bound, int threads) const;

 private:
  template <class GroupOf>
  std::vector<Sum> grouped_sums(const GroupOf& group_of, std::size_t groups, double p,
                                const std::vector<double>& divisors, bool in_float, int threads,
                                SumInOrder* whole = nullptr) const;

  std::vector<Span> spans_;
};

const Kernels& kernels_of(Dtype dtype);
inline int64_t item_size(Dtype dtype) { return kItemSizes[static_cast<std::size_t>(dtype)]; }

// Views complex arrays as real ones with twice as many elements. Their squares add up to the same sum, without square
// roots, and a real factor scales both parts.
std::vector<Span> as_real(std::vector<Span> spans);

// The variants that this processor can run, the fastest last, and a function that picks one.
std::vector<std::string> variants();
void use_variant(const std::string& name);

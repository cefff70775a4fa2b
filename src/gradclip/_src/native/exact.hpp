// Exact sums of magnitudes or squares. Each variant of the kernels compiles its own copy.
//
// Let 2**k be above the largest of up to 2,048 terms. Adding 1.5 * 2**(k+10) to a term and subtracting it again leaves
// a multiple of 2**(k-42). The sum of these parts needs at most 53 bits, so it is exact in any order. The remainders
// are treated the same way until they are zero (Rump, Ogita and Oishi, "Accurate floating-point summation", 2008). The
// square of a double is two terms: the rounded square and its rounding error. Doubles are scaled so that no term
// overflows or underflows. Those more than 2**400 below the largest are added in a second pass.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <memory>

#include "exact_sum.hpp"
#include "formats.hpp"
#include "kernels.hpp"
#include "reductions.hpp"

namespace {

constexpr int64_t kExactBlock = 2048;
constexpr int kHeadroom = 10;
constexpr int kTakenBits = 42;
// The largest number is scaled to about 1. Squares of numbers within this distance are above 2**-800, and their
// rounding errors are then far above the smallest normal number.
constexpr int kFarApart = 400;
// The smallest numbers would need 2**1074, which overflows.
constexpr int kLargestScale = 1000;
static_assert(kExactBlock << kTakenBits == int64_t{1} << 53 && kExactBlock % kLanes == 0 && kHeadroom + kTakenBits == 52);

using Bits = Vector<int64_t>;

// The bits set in any of several magnitudes. They give a power of two above all of these numbers, without the
// comparisons of a maximum. No bits are set if all numbers are zero.
struct BitsSeen {
  Bits bits = {};

  void add(Vector<double> x) { bits |= (Bits)x; }
  int64_t all() const {
    int64_t found = 0;
    for (int i = 0; i < Lanes<double>::kSize; ++i) found |= bits[i];
    return found & std::numeric_limits<int64_t>::max();  // remainders may be negative
  }
};

inline int exponent_above(int64_t bits) { return static_cast<int>(bits >> 52) - 1022; }

// Splits off a multiple of 2**(above - kTakenBits) from terms below 2**above, and adds it up.
class Extraction {
 public:
  // 1.5, not 1, so that even with a negative term the sum stays between two powers of two, where the spacing is
  // constant.
  explicit Extraction(int above) : shift_(Vector<double>{} + 1.5 * std::ldexp(1.0, above + kHeadroom)) {}

  Lanes<double> rest_of(Lanes<double> x) {
    for (int i = 0; i < Lanes<double>::kVectors; ++i) {
      const Vector<double> high = (x.v[i] + shift_) - shift_;
      sums_.v[i] += high;
      x.v[i] -= high;
      seen_.add(x.v[i]);
    }
    return x;
  }
  int64_t seen() const { return seen_.all(); }
  void add_to(ExactSum& into, int exponent) const {
    const double sum = sum_of_lanes(sums_);
    if (sum != 0.0) into.add(sum, exponent);
  }

 private:
  Vector<double> shift_;
  Lanes<double> sums_ = {};
  BitsSeen seen_;
};

// Terms, a whole number of lanes.
struct Terms {
  alignas(64) double at[kExactBlock];

  // Adds the terms times 2**exponent. They are below 2**above, and only bits in `seen` are set. It ends: NaN and
  // infinities, of which a remainder would always be left, make their sum one of them, and that is refused.
  void add_to(ExactSum& into, int64_t count, int above, int64_t seen, int exponent) {
    while (seen) {
      above = std::min(above, exponent_above(seen));
      Extraction extraction(above);
      for (int64_t i = 0; i < count; i += kLanes) extraction.rest_of(Lanes<double>::load(at + i)).store(at + i);
      extraction.add_to(into, exponent);
      seen = extraction.seen();
      above -= kTakenBits;
    }
  }
};

// The rounding error of the square of `x`: exact, far from the ends of the range (Dekker 1971).
inline Vector<double> lacking(Vector<double> x, Vector<double> square) {
  // Both branches are exact, so every variant gives the same bits.
#if defined(__FMA__)
  return (Vector<double>)_mm256_fmsub_pd((__m256d)x, (__m256d)x, (__m256d)square);
#else
  const Vector<double> split = x * 134217729.0;  // 2**27 + 1 splits the 53 bits in halves with exact products
  const Vector<double> high = split - (split - x);
  const Vector<double> low = x - high;
  return ((high * high - square) + 2.0 * (high * low)) + low * low;
#endif
}

// Numbers of a block, scaled by a power of two. For doubles, numbers far below the largest are set aside.
template <class Format>
struct Scaled {
  static constexpr bool kWide = std::is_same_v<Format, Float64>;
  int scale = 0;
  Vector<double> factor = {}, least = {};
  BitsSeen far;

  explicit Scaled(double largest) {
    if constexpr (kWide) {
      scale = std::clamp(-std::ilogb(largest), -kLargestScale, kLargestScale);
      factor += std::ldexp(1.0, scale);
      least += std::ldexp(1.0, -scale - kFarApart);
    }
  }
  Lanes<double> of(Lanes<double> x) {
    for (auto& v : x.v) {
      v = magnitudes_of(v);
      if constexpr (kWide) {
        const Bits near = v >= least;
        far.add((Vector<double>)((Bits)v & ~near));
        v = (Vector<double>)((Bits)v & near) * factor;
      }
    }
    return x;
  }
};

template <class Format>
inline Lanes<double> lanes_at(const typename Format::Raw* x, int64_t at, int64_t count) {
  if (at + kLanes <= count) return widened(Format::load(x + at));
  return load_last<Real<Format>>(x, at, count);
}

// The memory for one block. It would take up much of the stack of a small thread.
struct Workspace {
  Terms rests, lacks, set_aside;
};

// Adds all numbers but those far below the largest. Returns whether there are such, and sets them aside.
template <class Format, bool squares>
bool add_near(const typename Format::Raw* x, int64_t count, Workspace& space, ExactSum& into) {
  const auto range = Range<typename Format::Bits>::of(reinterpret_cast<const typename Format::Bits*>(x), count);
  const double largest = wide<Format>(std::bit_cast<typename Format::Raw>(range.largest));
  if (largest == 0.0) return false;
  refuse_nonfinite(largest);
  Scaled<Format> scaled(largest);
  const int above = (squares ? 2 : 1) * (std::ilogb(largest) + scaled.scale + 1);
  const int exponent = (squares ? -2 : -1) * scaled.scale;
  constexpr bool kTwoTerms = squares && Scaled<Format>::kWide;
  BitsSeen lack_seen;
  Extraction extraction(above);
  for (int64_t i = 0; i < count; i += kLanes) {
    Lanes<double> lanes = scaled.of(lanes_at<Format>(x, i, count)), lack;
    for (int j = 0; j < Lanes<double>::kVectors; ++j) {
      if constexpr (squares) {
        const Vector<double> square = lanes.v[j] * lanes.v[j];
        if constexpr (kTwoTerms) lack_seen.add(lack.v[j] = lacking(lanes.v[j], square));
        lanes.v[j] = square;
      }
    }
    extraction.rest_of(lanes).store(space.rests.at + i);
    if constexpr (kTwoTerms) lack.store(space.lacks.at + i);
  }
  extraction.add_to(into, exponent);
  space.rests.add_to(into, count, above - kTakenBits, extraction.seen(), exponent);
  // The rounding error of a square is at most half an ulp.
  if constexpr (kTwoTerms) space.lacks.add_to(into, count, above - 53, lack_seen.all(), exponent);
  if constexpr (Scaled<Format>::kWide) {
    if (!scaled.far.all()) return false;
    for (int64_t i = 0; i < count; ++i) space.set_aside.at[i] = std::abs(x[i]) < scaled.least[0] ? x[i] : 0.0;
    return true;
  }
  return false;
}

template <class Format, bool squares>
void add_block(const typename Format::Raw* x, int64_t count, Workspace& space, ExactSum& into) {
  bool more = add_near<Format, squares>(x, count, space, into);
  if constexpr (Scaled<Format>::kWide) {
    while (more) more = add_near<Format, squares>(space.set_aside.at, count, space, into);
  }
}

template <class Format>
void exact_kernel(const void* data, int64_t count, int p, ExactSum& into) {
  const auto* x = static_cast<const typename Format::Raw*>(data);
  const std::unique_ptr<Workspace> space(new Workspace);  // not `make_unique`, which would fill it with zeros
  for (int64_t start = 0; start < count; start += kExactBlock) {
    const int64_t block = std::min(kExactBlock, count - start);
    if (p == 2) {
      add_block<Format, true>(x + start, block, *space, into);
    } else {
      add_block<Format, false>(x + start, block, *space, into);
    }
  }
}

}  // namespace

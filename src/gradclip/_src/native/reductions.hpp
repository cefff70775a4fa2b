// What one chunk of an array contributes to a norm. Each variant of the kernels compiles its own copy.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "formats.hpp"
#include "kernels.hpp"

namespace {

// The source of a sum's terms: real numbers, or pairs of them as magnitudes.
template <class Format_>
struct Real {
  using Format = Format_;
  using Raw = typename Format::Raw;
  static constexpr int kParts = 1;
  static constexpr bool kExactSquares = !std::is_same_v<Format, Float64>;

  static Lanes<double> load(const Raw* x) { return widened(Format::load(x)); }
};

// Squares of floats fit in double, and so does their sum. Squares of doubles may not, and `hypot` takes longer.
template <class Format_>
struct Pairs {
  using Format = Format_;
  using Raw = typename Format::Raw;
  static constexpr int kParts = 2;
  static constexpr bool kExactSquares = false;

  static double magnitude(const Raw* x) {
    const double real = x[0], imag = x[1];
    if constexpr (std::is_same_v<Format, Float64>) return std::hypot(real, imag);
    return std::sqrt(real * real + imag * imag);
  }
  static Lanes<double> load(const Raw* x) {
    double magnitudes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) magnitudes[lane] = magnitude(x + 2 * lane);
    return Lanes<double>::load(magnitudes);
  }
};

template <class Load>
inline Lanes<double> load_lanes(const typename Load::Raw* x, int64_t at) {
  return Load::load(x + Load::kParts * at);
}

// The last lanes of an array, padded with zeros, which add nothing. Memory past the end must not be read.
template <class Load>
inline Lanes<double> load_last(const typename Load::Raw* x, int64_t from, int64_t count) {
  typename Load::Raw padded[Load::kParts * kLanes] = {};
  std::copy(x + Load::kParts * from, x + Load::kParts * count, padded);
  return Load::load(padded);
}

// Adds terms to the sums of their lanes. The term of a zero is zero, so padding adds nothing.
template <bool exact>
struct Squares {
  void add(Lanes<double>& sums, const Lanes<double>& x) const {
    for (int i = 0; i < Lanes<double>::kVectors; ++i) {
#if defined(__FMA__)
      // An exact square is the same whether or not it is fused with the addition, so every variant gives the same bits.
      if constexpr (exact) {
        sums.v[i] = (Vector<double>)_mm256_fmadd_pd((__m256d)x.v[i], (__m256d)x.v[i], (__m256d)sums.v[i]);
        continue;
      }
#endif
      sums.v[i] += x.v[i] * x.v[i];
    }
  }
};

// Squares of half types. They are exact in float too as long as they stay in its range, which squares of bfloat16 may
// leave. Four at a time are added in float: that costs three more roundings, but needs only a quarter of the
// conversions to double, which take most of the time.
struct SquaresInFloat : Squares<true> {
  static constexpr int64_t kTogether = 4;
  // For a sum at least this large, what float loses on up to 65,536 squares below its normal range is negligible.
  static constexpr double kSmallestSum = 0x1p-80;

  static bool fits(double sum) { return sum >= kSmallestSum && std::isfinite(sum); }

  static void add_float(Lanes<float>& sums, const Lanes<float>& x) {
    for (int i = 0; i < Lanes<float>::kVectors; ++i) {
#if defined(__FMA__)
      sums.v[i] = (Vector<float>)_mm256_fmadd_ps((__m256)x.v[i], (__m256)x.v[i], (__m256)sums.v[i]);
#else
      sums.v[i] += x.v[i] * x.v[i];
#endif
    }
  }
};

struct Magnitudes {
  void add(Lanes<double>& sums, const Lanes<double>& x) const {
    for (int i = 0; i < Lanes<double>::kVectors; ++i) sums.v[i] += magnitudes_of(x.v[i]);
  }
};

// (|x| / divisor)**p. Integer powers use multiplication, the same on every machine. Other powers use the platform's
// pow.
struct Powers {
  double p, divisor;

  void add(Lanes<double>& sums, const Lanes<double>& x) const {
    const bool integer = p <= kLargestPower && p == std::floor(p);
    for (int i = 0; i < Lanes<double>::kVectors; ++i) {
      const Vector<double> base = magnitudes_of(x.v[i]) / divisor;
      sums.v[i] += integer ? multiplied(base, static_cast<int>(p)) : raised(base);
    }
  }

 private:
  static Vector<double> multiplied(Vector<double> base, int power) {
    Vector<double> result = Vector<double>{} + 1.0;
    for (; power > 1; power /= 2, base *= base) {
      if (power % 2) result *= base;
    }
    return result * base;
  }
  Vector<double> raised(Vector<double> base) const {
    for (int lane = 0; lane < Lanes<double>::kSize; ++lane) base[lane] = std::pow(base[lane], p);
    return base;
  }
};

// A sum of up to 65,536 terms on 16 lanes, in three levels: each term goes through at most kAdditions additions. The
// order is fixed, so every variant gives the same bits.
constexpr int64_t kInner = 64 * kLanes;
constexpr int64_t kMiddle = 8 * kInner;
static_assert(kChunk == 8 * kMiddle && kAdditions == 64 + 8 + (8 + 1) + 4);

inline double sum_of_lanes(Lanes<double> lanes) {
  // By halves, the same for every vector width: first whole vectors, then the numbers in the last one.
  for (int half = Lanes<double>::kVectors / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes.v[i] += lanes.v[i + half];
  }
  double total[Lanes<double>::kSize];
  store_to(total, lanes.v[0]);
  for (int half = Lanes<double>::kSize / 2; half > 0; half /= 2) {
    for (int lane = 0; lane < half; ++lane) total[lane] += total[lane + half];
  }
  return total[0];
}

template <class Load, class Terms>
inline void add_all(Lanes<double>& sums, const typename Load::Raw* x, const Terms& terms, int64_t from, int64_t to) {
  constexpr bool kConverted = Load::kParts == 1 && sizeof(typename Load::Raw) < sizeof(double);
  if constexpr (std::is_same_v<Terms, SquaresInFloat>) {
    constexpr int64_t kGroup = SquaresInFloat::kTogether * kLanes;
    for (; from + kGroup <= to; from += kGroup) {
      fetch_ahead(x + from, kGroup);
      Lanes<float> group = {};
      for (int64_t i = from; i < from + kGroup; i += kLanes) terms.add_float(group, Load::Format::load(x + i));
      sums += widened(group);
    }
  }
  for (; from < to; from += kLanes) {
    if constexpr (kConverted) fetch_ahead(x + from, kLanes);
    terms.add(sums, load_lanes<Load>(x, from));
  }
}

template <class Load, class Terms>
inline double sum_chunk(const typename Load::Raw* x, const Terms& terms, int64_t count) {
  const int64_t filled = count / kLanes * kLanes;
  Lanes<double> outer = {};
  for (int64_t middle_at = 0; middle_at < filled; middle_at += kMiddle) {
    const int64_t middle_end = std::min(filled, middle_at + kMiddle);
    Lanes<double> middle = {};
    for (int64_t inner_at = middle_at; inner_at < middle_end; inner_at += kInner) {
      const int64_t inner_end = std::min(middle_end, inner_at + kInner);
      Lanes<double> inner = {};
      add_all<Load>(inner, x, terms, inner_at, inner_end);
      middle += inner;
    }
    outer += middle;
  }
  Lanes<double> last = {};
  if (filled < count) terms.add(last, load_last<Load>(x, filled, count));
  outer += last;
  return sum_of_lanes(outer);
}

template <class Load>
inline double sum_of_powers(const typename Load::Raw* x, int64_t count, double p, double divisor,
                            bool in_float) {
  if constexpr (sizeof(typename Load::Raw) == 2) {
    if (p == 2.0 && divisor == 1.0 && in_float) {
      const double sum = sum_chunk<Load>(x, SquaresInFloat{}, count);
      if (SquaresInFloat::fits(sum)) return sum;
    }
  }
  if (p == 2.0 && divisor == 1.0) return sum_chunk<Load>(x, Squares<Load::kExactSquares>{}, count);
  if (p == 1.0 && divisor == 1.0) return sum_chunk<Load>(x, Magnitudes{}, count);
  return sum_chunk<Load>(x, Powers{p, divisor}, count);
}

// Infinity or NaN minus itself is NaN. Any other number minus itself is zero.
template <class Load>
inline int64_t count_nonfinite(const typename Load::Raw* x, int64_t count) {
  Vector<int64_t> found = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const bool full = i + kLanes <= count;
    const Lanes<double> lanes = full ? load_lanes<Load>(x, i) : load_last<Load>(x, i, count);
    for (const Vector<double>& vector : lanes.v) found -= vector - vector != 0.0;
  }
  int64_t total = 0;
  for (int lane = 0; lane < Lanes<double>::kSize; ++lane) total += found[lane];
  return total;
}

// The elements are read again only if a sum is non-finite, while they are still in cache.
template <class Load>
Sum sum_kernel(const void* data, int64_t count, double p, double divisor, bool in_float) {
  const auto* x = static_cast<const typename Load::Raw*>(data);
  const double total = sum_of_powers<Load>(x, count, p, divisor, in_float);
  return {total, std::isfinite(total) ? 0 : count_nonfinite<Load>(x, count)};
}

// The largest and smallest magnitudes, as bits, which compare as integers.
template <class Bits>
struct Range {
  Bits largest = 0, smallest = std::numeric_limits<Bits>::max();

  static Range of(const Bits* bits, int64_t count) {
    Range found;
    if (count < kLanes) {
      for (int64_t i = 0; i < count; ++i) found.take(bits[i] & kMagnitude, bits[i] & kMagnitude);
      return found;
    }
    auto largest = Lanes<Bits>::filled(found.largest), smallest = Lanes<Bits>::filled(found.smallest);
    // The last load overlaps elements already seen, which changes no extreme.
    for (int64_t i = 0; i < count; i += kLanes) {
      const auto x = Lanes<Bits>::load(bits + std::min(i, count - kLanes));
      for (int j = 0; j < Lanes<Bits>::kVectors; ++j) {
        const Vector<Bits> magnitude = x.v[j] & kMagnitude;
        largest.v[j] = magnitude > largest.v[j] ? magnitude : largest.v[j];
        smallest.v[j] = magnitude < smallest.v[j] ? magnitude : smallest.v[j];
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      const int j = lane / Lanes<Bits>::kSize, at = lane % Lanes<Bits>::kSize;
      found.take(largest.v[j][at], smallest.v[j][at]);
    }
    return found;
  }

 private:
  static constexpr Bits kMagnitude = std::numeric_limits<Bits>::max();
  void take(Bits large, Bits small) {
    largest = std::max(largest, large);
    smallest = std::min(smallest, small);
  }
};

template <class Format>
Extremes extremes_kernel(const void* data, int64_t count) {
  using Raw = typename Format::Raw;
  const auto range = Range<typename Format::Bits>::of(static_cast<const typename Format::Bits*>(data), count);
  const bool finite = range.largest < Format::kInfinity;
  return {wide<Format>(std::bit_cast<Raw>(range.largest)), wide<Format>(std::bit_cast<Raw>(range.smallest)),
          finite ? 0 : count_nonfinite<Real<Format>>(static_cast<const Raw*>(data), count)};
}

template <class Format>
Extremes pair_extremes_kernel(const void* data, int64_t count) {
  const auto* x = static_cast<const typename Format::Raw*>(data);
  Extremes found{0.0, std::numeric_limits<double>::infinity(), 0};
  for (int64_t i = 0; i < count; ++i) {
    const double magnitude = Pairs<Format>::magnitude(x + 2 * i);
    found.nonfinite += !std::isfinite(magnitude);
    // `std::max` would drop a NaN.
    found.largest = magnitude > found.largest || std::isnan(magnitude) ? magnitude : found.largest;
    found.smallest = std::min(found.smallest, magnitude);
  }
  return found;
}

}  // namespace

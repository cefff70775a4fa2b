// Floating-point formats: how 16 elements are widened, and how products are narrowed, rounding toward zero. Internal
// linkage, as in lanes.hpp. The 16 lanes are the same for every vector width.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "lanes.hpp"

namespace {

// The lower and upper halves of a vector, as double.
struct Widened {
  Vector<double> low, high;
};

inline Widened widened(Vector<float> x) {
#if defined(__AVX2__)
  const auto whole = (__m256)x;
  return {(Vector<double>)_mm256_cvtps_pd(_mm256_castps256_ps128(whole)),
          (Vector<double>)_mm256_cvtps_pd(_mm256_extractf128_ps(whole, 1))};
#elif defined(__x86_64__)
  const auto whole = (__m128)x;
  return {(Vector<double>)_mm_cvtps_pd(whole), (Vector<double>)_mm_cvtps_pd(_mm_movehl_ps(whole, whole))};
#else
  return {Vector<double>{x[0], x[1]}, Vector<double>{x[2], x[3]}};
#endif
}

inline Lanes<double> widened(Lanes<float> x) {
  Lanes<double> wide;
  for (int i = 0; i < Lanes<float>::kVectors; ++i) {
    const auto [low, high] = widened(x.v[i]);
    wide.v[2 * i] = low;
    wide.v[2 * i + 1] = high;
  }
  return wide;
}

inline Lanes<double> widened(Lanes<double> x) { return x; }

// A product below the normal range may have been rounded up by half a step. One step less is certainly not above the
// exact product. A true comparison is -1, and subtracting 1 from the bits moves the number one step toward zero.
template <class Number>
inline Vector<Number> not_above(Vector<Number> y) {
  using Integer = std::conditional_t<sizeof(Number) == 4, int32_t, int64_t>;
  constexpr Number kSmallestNormal = std::numeric_limits<Number>::min();
  const Vector<Integer> below_normal = (y < kSmallestNormal) & (y > -kSmallestNormal) & (y != 0);
  return (Vector<Number>)((Vector<Integer>)y + below_normal);
}

inline bool any(Vector<int32_t> mask) {
#if defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#elif defined(__x86_64__)
  return _mm_movemask_epi8((__m128i)mask) != 0;
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

inline Vector<double> magnitudes_of(Vector<double> x) {
  return (Vector<double>)((Vector<int64_t>)x & std::numeric_limits<int64_t>::max());
}

struct Float64 {
  using Raw = double;
  using Bits = int64_t;
  using Product = double;
  static constexpr Bits kInfinity = 0x7ff0000000000000;

  static Lanes<double> load(const Raw* x) { return Lanes<double>::load(x); }
  static Lanes<double> load_in_order(const Raw* x) { return load(x); }
  static void store(const Lanes<double>& y, Raw* x) { y.store(x); }
  // Moving all down takes no longer than a test.
  template <int kGroups>
  static bool maybe_below_normal(const Lanes<double> (&)[kGroups]) {
    return true;
  }
};

struct Float32 {
  using Raw = float;
  using Bits = int32_t;
  using Product = float;
  static constexpr Bits kInfinity = 0x7f800000;

  static Lanes<double> load(const Raw* x) {
#if defined(__AVX2__)
    Lanes<double> wide;  // converted on loading, without the shuffle that register halves need
    for (int i = 0; i < Lanes<double>::kVectors; ++i) {
      wide.v[i] = (Vector<double>)_mm256_cvtps_pd(_mm_loadu_ps(x + i * Lanes<double>::kSize));
    }
    return wide;
#else
    return widened(Lanes<float>::load(x));
#endif
  }
  static Lanes<double> load_in_order(const Raw* x) { return load(x); }
  static void store(const Lanes<float>& y, Raw* x) { y.store(x); }
  // Whether a product is non-zero and at most the smallest normal number: fewer instructions than an exact test.
  template <int kGroups>
  static bool maybe_below_normal(const Lanes<float> (&products)[kGroups]) {
    Vector<int32_t> found = {};
    for (const auto& group : products) {
      for (const auto& vector : group.v) {
        const auto magnitude = (Vector<uint32_t>)vector & 0x7fffffffu;
        found |= (Vector<int32_t>)(magnitude + 0x7f7fffffu) >= 0x7f800000;
      }
    }
    return any(found);
  }
};

// The upper half of a float. Elements with even index go to the lower eight lanes, those with odd index to the others.
// A shift and a mask then widen two elements at once. A sum of squares can use any fixed order.
struct BFloat16 {
  using Raw = uint16_t;
  using Bits = int16_t;
  using Product = float;
  static constexpr Bits kInfinity = 0x7f80;
  static constexpr int kPairs = Lanes<float>::kVectors / 2;
  static constexpr int kElements = kBytes / sizeof(Raw);

  static Lanes<float> load(const Raw* x) {
    Lanes<float> lanes;
    for (int i = 0; i < kPairs; ++i) {
      const auto pairs = load_from<Vector<uint32_t>>(x + i * kElements);
      lanes.v[i] = (Vector<float>)(pairs << 16);
      lanes.v[kPairs + i] = (Vector<float>)(pairs & 0xffff0000);
    }
    return lanes;
  }
  // For sums over examples, where each lane is its own column.
  static Lanes<float> load_in_order(const Raw* x) {
    Lanes<float> lanes;
    for (int i = 0; i < Lanes<float>::kVectors; ++i) {
      const auto bits = load_from<Halves>(x + i * Lanes<float>::kSize);
      lanes.v[i] = (Vector<float>)(__builtin_convertvector(bits, Vector<uint32_t>) << 16);
    }
    return lanes;
  }
  // Cutting off bits makes no infinity of a NaN, because the NaN of a product has its highest mantissa bit set.
  static void store(const Lanes<float>& y, Raw* x) {
    for (int i = 0; i < kPairs; ++i) store_to(x + i * kElements, narrowed(y, i));
  }
  // Whether a product may be below the normal range. What is cut off to zero needs no test.
  template <int kGroups>
  static bool maybe_below_normal(const Lanes<float> (&products)[kGroups]) {
    Vector<int16_t> largest = {};
    for (const auto& group : products) {
      for (int i = 0; i < kPairs; ++i) {
        const auto moved = (Vector<int16_t>)(((Vector<uint16_t>)narrowed(group, i) & 0x7fff) + 0x7f80);
        largest = moved > largest ? moved : largest;
      }
    }
    return any((Vector<int32_t>)(largest > 0x7f80));
  }

 private:
  static Vector<uint32_t> narrowed(const Lanes<float>& y, int i) {
    return (Vector<uint32_t>)y.v[i] >> 16 | ((Vector<uint32_t>)y.v[kPairs + i] & 0xffff0000);
  }
};

struct Float16 {
  using Raw = uint16_t;
  using Bits = int16_t;
  using Product = float;
  static constexpr Bits kInfinity = 0x7c00;

  static Lanes<float> load(const Raw* x) {
    Lanes<float> lanes;
    for (int i = 0; i < Lanes<float>::kVectors; ++i) {
      lanes.v[i] = widened(load_from<Halves>(x + i * Lanes<float>::kSize));
    }
    return lanes;
  }
  static Lanes<float> load_in_order(const Raw* x) { return load(x); }
  static void store(const Lanes<float>& y, Raw* x) {
    for (int i = 0; i < Lanes<float>::kVectors; ++i) {
      store_to(x + i * Lanes<float>::kSize, narrowed(y.v[i]));
    }
  }
  // Products below the normal range of float become zeros.
  template <int kGroups>
  static bool maybe_below_normal(const Lanes<float> (&)[kGroups]) {
    return false;
  }

 private:
#if defined(__F16C__)
  static Vector<float> widened(Halves x) { return (Vector<float>)_mm256_cvtph_ps((__m128i)x); }
  static Halves narrowed(Vector<float> y) {
    return (Halves)_mm256_cvtps_ph((__m256)y, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  }
#else
  // The multiplication adjusts the exponent. It is exact and handles subnormals. GCC 12 does not vectorize the type
  // _Float16.
  static Vector<float> widened(Halves x) {
    const auto bits = __builtin_convertvector(x, Vector<int32_t>);
    const Vector<int32_t> magnitude = bits & 0x7fff;
    const auto scaled = (Vector<int32_t>)((Vector<float>)(magnitude << 13) * 0x1p112f);
    const Vector<int32_t> special = (magnitude >= 0x7c00) & 0x7f800000;
    return (Vector<float>)(scaled | special | (bits & 0x8000) << 16);
  }
  // Round toward zero: cut bits off normal results, and compute smaller ones as a number of smallest steps.
  static Halves narrowed(Vector<float> y) {
    const auto bits = (Vector<int32_t>)y;
    const Vector<int32_t> magnitude = bits & 0x7fffffff;
    const Vector<int32_t> below_normal = magnitude < 0x38800000;
    const auto steps = __builtin_convertvector((Vector<float>)(magnitude & below_normal) * 0x1p24f, Vector<int32_t>);
    const Vector<int32_t> cut = (magnitude >> 13) - (112 << 10);
    const Vector<int32_t> quiet_nan = (magnitude > 0x7f800000) & (0x200 | (magnitude >> 13 & 0x3ff));
    const Vector<int32_t> finite = (steps & below_normal) | (cut & ~below_normal);
    const Vector<int32_t> is_finite = magnitude < 0x7f800000;
    const Vector<int32_t> result = (finite & is_finite) | ((0x7c00 | quiet_nan) & ~is_finite);
    return __builtin_convertvector(result | (bits >> 16 & 0x8000), Halves);
  }
#endif
};

template <class Format>
inline double wide(typename Format::Raw x) {
  const typename Format::Raw padded[kLanes] = {x};
  return static_cast<double>(Format::load(padded).v[0][0]);
}

}  // namespace

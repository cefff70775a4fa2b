// Kernels that write: scaling and clamping. Each variant of the kernels compiles its own copy.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <type_traits>

#include "formats.hpp"
#include "kernels.hpp"

namespace {

// Elements in the format in which they are multiplied.
template <class Format>
inline Lanes<typename Format::Product> load_to_multiply(const typename Format::Raw* x) {
  using Product = typename Format::Product;
  if constexpr (std::is_same_v<typename Format::Raw, Product>) return Lanes<Product>::load(x);
  else return Format::load(x);
}

// Products are rounded to nearest. The factors are lowered to make up for this, but not enough for products below the
// normal range. These are rare, so each format tests several lanes at a time.
template <class Format, int kGroups>
inline void move_down(Lanes<typename Format::Product> (&lanes)[kGroups]) {
  if (!Format::maybe_below_normal(lanes)) [[likely]] return;
  for (auto& group : lanes) {
    for (auto& vector : group.v) vector = not_above<typename Format::Product>(vector);
  }
}

template <class Format, bool twice, int kGroups>
inline void scale_lanes(const typename Format::Raw* x, typename Format::Raw* y, typename Format::Product first,
                        typename Format::Product second) {
  Lanes<typename Format::Product> lanes[kGroups];
  for (int group = 0; group < kGroups; ++group) {
    lanes[group] = load_to_multiply<Format>(x + group * kLanes);
    for (auto& vector : lanes[group].v) {
      vector *= first;
      if constexpr (twice) vector *= second;
    }
  }
  move_down<Format>(lanes);
  for (int group = 0; group < kGroups; ++group) Format::store(lanes[group], y + group * kLanes);
}

template <class Format, bool twice>
inline void scale_chunk(const typename Format::Raw* x, typename Format::Raw* y, int64_t count,
                        typename Format::Product first, typename Format::Product second) {
  // As many as fit in the registers.
  constexpr int kGroups = kBytes / 2 / sizeof(typename Format::Product);
  int64_t i = 0;
  for (; i + kGroups * kLanes <= count; i += kGroups * kLanes) {
    scale_lanes<Format, twice, kGroups>(x + i, y + i, first, second);
  }
  for (; i + kLanes <= count; i += kLanes) scale_lanes<Format, twice, 1>(x + i, y + i, first, second);
  // The remainder goes through the same code, so that no result depends on an element's position.
  typename Format::Raw last[kLanes] = {};
  std::copy(x + i, x + count, last);
  scale_lanes<Format, twice, 1>(last, last, first, second);
  std::copy_n(last, count - i, y + i);
}

template <class Format>
void scale_kernel(const void* from, void* to, int64_t count, double first, double second) {
  // There is nearly always a single factor. The second is for coefficients outside the normal range.
  const auto scale = second == 1.0 ? scale_chunk<Format, false> : scale_chunk<Format, true>;
  using Raw = typename Format::Raw;
  using Product = typename Format::Product;
  scale(static_cast<const Raw*>(from), static_cast<Raw*>(to), count, static_cast<Product>(first),
        static_cast<Product>(second));
}

template <class Format>
inline void subtract_lanes(const typename Format::Raw* left, const typename Format::Raw* right, double* to) {
  Lanes<double> lanes = widened(Format::load_in_order(left));
  const Lanes<double> others = widened(Format::load_in_order(right));
  for (int i = 0; i < Lanes<double>::kVectors; ++i) lanes.v[i] -= others.v[i];
  lanes.store(to);
}

template <class Format>
void subtract_kernel(const void* left, const void* right, double* to, int64_t count) {
  using Raw = typename Format::Raw;
  const auto *x = static_cast<const Raw*>(left), *y = static_cast<const Raw*>(right);
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) subtract_lanes<Format>(x + i, y + i, to + i);
  Raw last[2][kLanes] = {};
  double found[kLanes];
  std::copy(x + i, x + count, last[0]);
  std::copy(y + i, y + count, last[1]);
  subtract_lanes<Format>(last[0], last[1], found);
  std::copy_n(found, count - i, to + i);
}

// The largest number of the format that is at most `bound`.
template <class Format>
inline typename Format::Bits bound_bits(double bound) {
  using Product = typename Format::Product;
  // Handled here, because `store` supports only numbers in the format's range: products are never larger than elements.
  constexpr auto kLargest = static_cast<typename Format::Bits>(Format::kInfinity - 1);
  if (std::isinf(bound)) return Format::kInfinity;
  if (bound >= wide<Format>(std::bit_cast<typename Format::Raw>(kLargest))) return kLargest;
  // The conversion rounds to nearest, which may round up.
  auto product = static_cast<Product>(bound);
  if (product > bound) product = std::nextafter(product, Product{0});
  typename Format::Raw lanes[kLanes];
  Format::store(Lanes<Product>::filled(product), lanes);
  return std::bit_cast<typename Format::Bits>(lanes[0]);
}

// The bits of magnitudes compare as integers. Those above infinity are NaN and stay.
template <class Format>
void clamp_kernel(void* data, int64_t count, double bound) {
  using Bits = typename Format::Bits;
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max();
  auto* x = static_cast<Bits*>(data);
  const Bits limit = bound_bits<Format>(bound);
  const auto beyond = [limit](Bits magnitude) {
    return static_cast<Bits>(((magnitude > limit) & (magnitude <= Format::kInfinity)) ? -1 : 0);
  };
  // A chunk with nothing above the bound is only read: memory access is what takes time.
  Bits any = 0;
  for (int64_t i = 0; i < count; ++i) any |= beyond(x[i] & kMagnitude);
  if (!any) return;
  for (int64_t i = 0; i < count; ++i) {
    const Bits magnitude = x[i] & kMagnitude;
    const Bits mask = beyond(magnitude);
    x[i] = static_cast<Bits>((x[i] & ~kMagnitude) | (limit & mask) | (magnitude & ~mask));
  }
}

}  // namespace

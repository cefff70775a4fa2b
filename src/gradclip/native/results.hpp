// What is written: scaled and clamped chunks. Each variant of the kernels compiles its own copy.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "formats.hpp"
#include "kernels.hpp"

namespace {

// Products are rounded to nearest; `store` makes of them what is not above the exact ones.
template <class Format, bool twice>
inline void scale_lanes(const typename Format::Raw* x, typename Format::Raw* y, typename Format::Product first,
                        typename Format::Product second) {
  auto lanes = Format::load(x);
  for (auto& vector : lanes.v) {
    vector *= first;
    if constexpr (twice) vector *= second;
  }
  Format::store(lanes, y);
}

template <class Format, bool twice>
inline void scale_chunk(const typename Format::Raw* x, typename Format::Raw* y, int64_t count,
                        typename Format::Product first, typename Format::Product second) {
  const int64_t filled = count / kLanes * kLanes;
  for (int64_t i = 0; i < filled; i += kLanes) scale_lanes<Format, twice>(x + i, y + i, first, second);
  // The rest goes through the same code, so that no element depends on where it lies.
  typename Format::Raw last[kLanes] = {};
  std::copy(x + filled, x + count, last);
  scale_lanes<Format, twice>(last, last, first, second);
  std::copy_n(last, count - filled, y + filled);
}

template <class Format>
void scale_kernel(const void* from, void* to, int64_t count, double first, double second) {
  // Nearly always there is one factor alone: the second is for coefficients beyond the normal range.
  const auto scale = second == 1.0 ? scale_chunk<Format, false> : scale_chunk<Format, true>;
  using Raw = typename Format::Raw;
  using Product = typename Format::Product;
  scale(static_cast<const Raw*>(from), static_cast<Raw*>(to), count, static_cast<Product>(first),
        static_cast<Product>(second));
}

// The largest number of the format that is at most `bound`.
template <class Format>
inline typename Format::Bits bound_bits(double bound) {
  using Product = typename Format::Product;
  // The conversion rounds to nearest, which may be up.
  auto product = static_cast<Product>(bound);
  if (product > bound) product = std::nextafter(product, Product{0});
  typename Format::Raw lanes[kLanes];
  Format::store(Lanes<Product>::filled(product), lanes);
  return std::bit_cast<typename Format::Bits>(lanes[0]);
}

// Magnitudes compare as the integers that their bits are; those above infinity's are NaN and stay.
template <class Format>
void clamp_kernel(void* data, int64_t count, double bound) {
  using Bits = typename Format::Bits;
  constexpr Bits kMagnitude = std::numeric_limits<Bits>::max();
  auto* x = static_cast<Bits*>(data);
  const Bits limit = bound_bits<Format>(bound);
  const auto beyond = [limit](Bits magnitude) {
    return static_cast<Bits>(((magnitude > limit) & (magnitude <= Format::kInfinity)) ? -1 : 0);
  };
  // A chunk in which nothing exceeds the bound is only read: memory is what takes the time.
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

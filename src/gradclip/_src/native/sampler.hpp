// Attempts of the sampler of discrete Gaussian noise. Each variant of the kernels compiles its own copy, and all make the
// same decisions: see the proof in private/noise/discrete.py.
#pragma once

#include <bit>
#include <cmath>

#include "kernels.hpp"

namespace {

constexpr uint64_t kOne = std::bit_cast<uint64_t>(1.0), kTwoTo52 = std::bit_cast<uint64_t>(0x1p52);
constexpr double kToWhole = 0x1.8p52;  // a small number plus this, minus this, is the nearest whole number
constexpr double kFarthest = 100.0;    // exponents below it are cut: those attempts are accepted with less than 2**-104
constexpr double kLog2E = 0x1.71547652b82fep+0, kLog2 = 0x1.62e42fefa39efp-1;
constexpr double kMargin = 0x1p-30;
constexpr int kLargestV = 40;
constexpr int kBlock = 256;

template <int n>
constexpr double factorial = n * factorial<n - 1>;
template <>
constexpr double factorial<0> = 1.0;
template <int n>
constexpr double taylor = 1 / factorial<n>;

// exp(x) * 2**doublings, for x from -kFarthest to 0: with Taylor's polynomial on half of log 2 to either side of 0, whose
// remainder is below 2**-41.
double exp_doubled(double x, uint64_t doublings) {
  const double shifted = x * kLog2E + kToWhole;
  const double rest = x - (shifted - kToWhole) * kLog2;
  // In three sums of few steps each, which a processor computes side by side: one long sum waits for each of its steps.
  const double squared = rest * rest, to_4 = squared * squared;
  const double from_0 = (1.0 + rest) + (taylor<2> + taylor<3> * rest) * squared;
  const double from_4 = (taylor<4> + taylor<5> * rest) + (taylor<6> + taylor<7> * rest) * squared;
  const double from_8 = (taylor<8> + taylor<9> * rest) + taylor<10> * squared;
  const double sum = from_0 + (from_4 + from_8 * to_4) * to_4;
  const uint64_t exponent = std::bit_cast<uint64_t>(shifted) - std::bit_cast<uint64_t>(kToWhole) + doublings;
  return std::bit_cast<double>(std::bit_cast<uint64_t>(sum) + (exponent << 52));
}

// 1 or 0: whether z is accepted, and whether only exact arithmetic can decide that.
struct Attempt {
  int64_t z;
  uint64_t accepted;
  uint64_t unsettled;
};

// Words in bits: `first` is a sign, part of V and U; `second` is W and the rest of V.
class Attempts {
 public:
  explicit Attempts(const NoiseTarget& target)
      : u_bits_(target.bits),
        u_mask_((uint64_t{1} << target.bits) - 1),
        dropped_(target.bits > 51 ? target.bits - 51 : 0),
        rest_mask_(target.bits < 11 ? 0 : 4095),
        rest_shift_(target.bits < 11 ? 0 : target.bits - 11),
        largest_v_(target.bits > 56 ? (uint64_t{1} << (62 - target.bits)) - 1 : kLargestV),
        u_unit_(std::ldexp(1 / target.scale, dropped_)),
        v_unit_(std::ldexp(1 / target.scale, target.bits)),
        shift_(target.shift) {}

  Attempt operator()(uint64_t first, uint64_t second) const {
    const uint64_t u = first & u_mask_;
    const uint64_t v_bits = ((first - u) << 1) | ((second & rest_mask_) << rest_shift_);
    // As a fraction below 1, its exponent says how many of the first bits are 0.
    const double fraction = std::bit_cast<double>(kOne | (v_bits >> 12)) - 1.0;
    const uint64_t v = 1022 - (std::bit_cast<uint64_t>(fraction) >> 52);
    const double away = as_double(u >> dropped_) * u_unit_ + as_double(v) * v_unit_;
    const double p = exp_doubled(-at_most_farthest(0.5 * away * away + shift_), v);
    const double low = std::bit_cast<double>(kOne | (second >> 12)) - 1.0;
    const uint64_t below = is_negative(low + 0x1p-52 - p * (1 - kMargin)), within = is_negative(low - p * (1 + kMargin));
    const uint64_t known = 1 - ((largest_v_ - v) >> 63);
    const uint64_t y = u + (v << u_bits_), minus = first >> 63;
    const uint64_t minus_zero = minus & (1 - ((0 - y) >> 63));
    return {static_cast<int64_t>((y ^ (0 - minus)) + minus), known & below & ~minus_zero, 1 - (known & (below | (1 - within)))};
  }

 private:
  // What is decided here is computed from bits: a compiler that finds a branch does not use vectors.
  static uint64_t is_negative(double x) { return std::bit_cast<uint64_t>(x) >> 63; }
  static double at_most_farthest(double x) {
    const uint64_t beyond = 0 - is_negative(kFarthest - x);
    return std::bit_cast<double>((std::bit_cast<uint64_t>(x) & ~beyond) | (std::bit_cast<uint64_t>(kFarthest) & beyond));
  }
  static double as_double(uint64_t below_2_to_52) {
    return std::bit_cast<double>(kTwoTo52 | below_2_to_52) - 0x1p52;
  }

  int u_bits_;
  uint64_t u_mask_;
  int dropped_;
  uint64_t rest_mask_;
  int rest_shift_;
  uint64_t largest_v_;
  double u_unit_, v_unit_, shift_;
};

int64_t nearest_sum(int64_t value, int64_t noise) {
  int64_t sum;
  if (!__builtin_add_overflow(value, noise, &sum)) return sum;
  return noise < 0 ? INT64_MIN : INT64_MAX;
}

NoiseProgress noise_kernel(const NoiseTarget& target, const uint64_t* first, const uint64_t* second, int64_t attempts,
                           const int64_t* values, int64_t* sums, int64_t count) {
  const Attempts attempt(target);
  int64_t z[kBlock];
  uint64_t accepted[kBlock], unsettled[kBlock];
  int64_t used = 0, filled = 0;
  while (used < attempts && filled < count) {
    const int block = static_cast<int>(attempts - used < kBlock ? attempts - used : kBlock);
    uint64_t any_unsettled = 0;
    for (int i = 0; i < block; ++i) {
      const Attempt made = attempt(first[used + i], second[used + i]);
      z[i] = made.z;
      accepted[i] = made.accepted;
      unsettled[i] = made.unsettled;
      any_unsettled |= made.unsettled;
    }
    if (!any_unsettled && count - filled >= block) {
      for (int i = 0; i < block; ++i) {
        sums[filled] = nearest_sum(values[filled], z[i]);
        filled += static_cast<int64_t>(accepted[i]);
      }
      used += block;
      continue;
    }
    for (int i = 0; i < block && filled < count; ++i, ++used) {
      if (unsettled[i]) return {used, filled};
      if (!accepted[i]) continue;
      sums[filled] = nearest_sum(values[filled], z[i]);
      ++filled;
    }
  }
  return {used, filled};
}

}  // namespace

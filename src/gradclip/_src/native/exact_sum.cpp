#include "exact_sum.hpp"

#include <cmath>
#include <stdexcept>

void refuse_nonfinite(double number) {
  if (std::isfinite(number)) return;
  throw std::runtime_error(
      "An array holds NaN or an infinity that was not there a moment ago: another thread has written to it. Let that "
      "thread wait while norms are measured, or pass a copy.");
}

void ExactSum::add(double number, int exponent) {
  refuse_nonfinite(number);
  constexpr int kPrecision = 53;
  int place = 0;
  const auto mantissa = static_cast<std::int64_t>(std::ldexp(std::frexp(number, &place), kPrecision));
  const int position = place - kPrecision + exponent - kLowest;
  const int shift = position % 32;
  std::int64_t* digit = digits_.data() + position / 32;
  for (const std::int64_t half : {mantissa & 0xffffffff, mantissa >> 32}) {
    // Below 2**63, because a half has at most 32 bits and the shift is at most 31. The upper half may be negative.
    const std::int64_t shifted = half * (std::int64_t{1} << shift);
    digit[0] += shifted & 0xffffffff;
    digit[1] += shifted >> 32;
    ++digit;
  }
}

void ExactSum::add(const ExactSum& other) {
  for (std::size_t i = 0; i < kDigits; ++i) digits_[i] += other.digits_[i];
}

std::vector<std::uint8_t> ExactSum::bytes() const {
  std::vector<std::uint8_t> found;
  found.reserve(4 * kDigits);
  // Carries are propagated only here, so that each addition changes a few digits and not a chain through all of them.
  std::int64_t carry = 0;
  for (const std::int64_t digit : digits_) {
    const std::int64_t whole = digit + carry;
    for (int shift = 0; shift < 32; shift += 8) found.push_back(static_cast<std::uint8_t>(whole >> shift));
    carry = whole >> 32;
  }
  return found;
}

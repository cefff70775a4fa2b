// A sum that is not rounded, whatever is added to it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

// Digits of 32 bits, signed while carries have not been passed on: a long accumulator (Kulisch, "Computer Arithmetic
// and Validity", 2008). They reach from below the square of the smallest double to 2**40 squares of the largest. A
// digit has room for 2**30 additions.
class ExactSum {
 public:
  static constexpr int kLowest = -2240;

  // Adds number * 2**exponent.
  void add(double number, int exponent);
  void add(const ExactSum& other);

  // The bytes, the lowest first, of the sum in units of 2**kLowest, which must not be negative.
  std::vector<std::uint8_t> bytes() const;

 private:
  static constexpr std::size_t kDigits = 140;
  std::array<std::int64_t, kDigits> digits_ = {};
};

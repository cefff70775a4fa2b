// A sum without any rounding.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

// A long accumulator with 32-bit digits (Kulisch, "Computer Arithmetic and Validity", 2008). Each digit is stored in a
// signed 64-bit integer, so that carries can wait for 2**30 additions. The digits cover the range from below the square
// of the smallest double to 2**40 squares of the largest.
class ExactSum {
 public:
  static constexpr int kLowest = -2240;

  // Adds number * 2**exponent.
  void add(double number, int exponent);
  void add(const ExactSum& other);

  // The bytes of the sum in units of 2**kLowest, lowest byte first. The sum must not be negative.
  std::vector<std::uint8_t> bytes() const;

 private:
  static constexpr std::size_t kDigits = 140;
  std::array<std::int64_t, kDigits> digits_ = {};
};

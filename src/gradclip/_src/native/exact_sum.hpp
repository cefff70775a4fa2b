// A sum without any rounding.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

// Throws if a number is NaN or infinite. Arrays with such numbers have no exact sum, and nobody asks for one: another
// thread must have written them since their norm was measured.
void refuse_nonfinite(double number);

// A long accumulator with 32-bit digits (Kulisch, "Computer Arithmetic and Validity", 2008). Each digit is stored in a
// signed 64-bit integer, so that carries can wait for 2**30 additions. The digits cover the range from below the square
// of the smallest double to 2**40 squares of the largest.
class ExactSum {
 public:
  static constexpr int kLowest = -2240;

  // Adds number * 2**exponent. The number must be finite.
  void add(double number, int exponent);
  void add(const ExactSum& other);

  // The bytes of the sum in units of 2**kLowest, lowest byte first. The sum must not be negative.
  std::vector<std::uint8_t> bytes() const;

 private:
  static constexpr std::size_t kDigits = 140;
  std::array<std::int64_t, kDigits> digits_ = {};
};

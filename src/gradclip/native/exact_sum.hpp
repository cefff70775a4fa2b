// A sum that is not rounded, whatever is added to it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

// A long accumulator of digits of 32 bits (Kulisch, "Computer Arithmetic and Validity", 2008). Each is held in a signed
// integer of 64 bits, so that carries can wait for 2**30 additions. The digits reach from below the square of the
// smallest double to 2**40 squares of the largest.
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

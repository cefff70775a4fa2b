// Matrices in memory as operands of products.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "arrays.hpp"

// Rows of the same length, one after another.
struct Matrix {
  const std::byte* data;
  int64_t columns;
  Dtype dtype;

  static Matrix of(const Arrays& arrays, int64_t columns) {
    const Span& span = arrays.spans().at(0);
    if (is_complex(span.dtype)) throw std::invalid_argument("products are of real matrices");
    return {span.data, columns, span.dtype};
  }
  const void* row(int64_t index) const { return data + index * columns * item_size(dtype); }
  const Kernels& kernels() const { return kernels_of(dtype); }
};

constexpr int64_t rounded_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// Numbers that start at a cache line: vectors that cross one load slowly.
class Buffer {
 public:
  explicit Buffer(int64_t count) : numbers_(static_cast<std::size_t>(count + kLine)) {}
  double* data() {
    void* start = numbers_.data();
    std::size_t space = numbers_.size() * sizeof(double);
    return static_cast<double*>(std::align(kLine * sizeof(double), sizeof(double), start, space));
  }

 private:
  static constexpr int64_t kLine = 8;
  std::vector<double> numbers_;
};

#include "gram.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "matrices.hpp"

namespace {

// The rows whose inner products with all rows before them are computed at once, and the elements multiplied at once.
constexpr int64_t kStrip = 16 * kTileRows, kDepth = 128;
constexpr int64_t kMultipliedByOne = int64_t{1} << 22;

// Inner products of the rows of a strip with all rows up to its end.
class InnerProducts {
 public:
  explicit InnerProducts(const Matrix& matrix, int64_t terms)
      : matrix_(matrix),
        stride_(rounded_up(terms, kTileColumns)),
        products_(rounded_up(std::min(terms, kStrip), kTileRows) * stride_),
        left_(rounded_up(std::min(terms, kStrip), kTileRows) * kDepth),
        right_(stride_ * kDepth) {}

  // `first` is the number of the first row of all terms.
  void compute(int64_t first, Columns strip) {
    std::vector<const void*> rows;
    for (int64_t i = 0; i < strip.end; ++i) rows.push_back(matrix_.row(first + i));
    const int64_t height = strip.end - strip.begin;
    if (!matrix_.columns) std::fill_n(products_.data(), rounded_up(height, kTileRows) * stride_, 0.0);
    for (int64_t at = 0; at < matrix_.columns; at += kDepth) {
      const Columns columns = {at, std::min(matrix_.columns, at + kDepth)};
      const auto pack = matrix_.kernels().pack_across;
      pack({rows.data() + strip.begin, height}, columns, kTileRows, left_.data());
      pack({rows.data(), strip.end}, columns, kTileColumns, right_.data());
      multiply(strip, columns.end - columns.begin, at > 0);
    }
  }
  // Takes the product of a row of the strip with itself, and leaves those with the rows before it, then zeros.
  double take_own(int64_t index, int64_t own) {
    double* products = row(index);
    const double taken = products[own];
    std::fill(products + own, products + rounded_up(own, kTileColumns), 0.0);
    return taken;
  }
  double* row(int64_t index) { return products_.data() + index * stride_; }

 private:
  // Leaves out tiles above the diagonal.
  void multiply(Columns strip, int64_t depth, bool add) {
    const auto multiply = kernels_of(Dtype::float64).multiply;
    for (int64_t column = 0; column < strip.end; column += kTileColumns) {
      for (int64_t row = strip.begin; row < strip.end; row += kTileRows) {
        if (column >= row + kTileRows) continue;
        multiply(left_.data() + (row - strip.begin) * depth, right_.data() + column * depth, depth,
                 products_.data() + (row - strip.begin) * stride_ + column, stride_,
                 std::min(kTileRows, strip.end - row), add);
      }
    }
  }

  const Matrix matrix_;
  const int64_t stride_;
  Buffer products_, left_, right_;
};

// What one row adds: its product with itself, and twice those with the rows before it.
struct Added {
  double square;
  double size;
};

class Grams {
 public:
  Grams(const Matrix& left, const Matrix& right, const GramShape& shape)
      : left_(left), right_(right), terms_(shape.terms), strips_((terms_ + kStrip - 1) / kStrip),
        added_(static_cast<std::size_t>(shape.sums * shape.terms)) {}

  int64_t pieces() const { return static_cast<int64_t>(added_.size()) / std::max<int64_t>(1, terms_) * strips_; }

  void run(std::atomic<int64_t>& next) {
    InnerProducts left(left_, terms_), right(right_, terms_);
    const auto dot = kernels_of(Dtype::float64).dot;
    for (int64_t piece = next++; piece < pieces(); piece = next++) {
      // The longest strips first, so that no thread ends with one.
      const int64_t first = piece / strips_ * terms_, begin = (strips_ - 1 - piece % strips_) * kStrip;
      const Columns strip = {begin, std::min(terms_, begin + kStrip)};
      left.compute(first, strip);
      right.compute(first, strip);
      for (int64_t i = 0; i < strip.end - begin; ++i) {
        const double x = left.take_own(i, begin + i), y = right.take_own(i, begin + i);
        const double others = dot(left.row(i), right.row(i), rounded_up(begin + i, kTileColumns));
        added_[first + begin + i] = {2.0 * others + x * y, std::sqrt(x) * std::sqrt(y)};
      }
    }
  }
  Added sum(int64_t n) const {
    Added whole = {0.0, 0.0};
    for (int64_t i = n * terms_; i < (n + 1) * terms_; ++i) {
      whole.square += added_[i].square;
      whole.size += added_[i].size;
    }
    return whole;
  }

 private:
  const Matrix left_, right_;
  const int64_t terms_, strips_;
  std::vector<Added> added_;
};

double sum_of_squares(const Matrix& matrix, int64_t row) {
  SumInOrder sum;
  const auto* data = static_cast<const std::byte*>(matrix.row(row));
  for (int64_t at = 0; at < matrix.columns; at += kChunk) {
    const int64_t count = std::min(kChunk, matrix.columns - at);
    sum.add(matrix.kernels().sum(data + at * item_size(matrix.dtype), count, 2.0, 1.0, false));
  }
  return sum.sum().value;
}

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

}  // namespace

void gram_squares(const Arrays& left, const Arrays& right, GramShape shape, double* squares, double* sizes,
                  int threads) {
  require(shape.sums >= 0 && shape.terms >= 0 && shape.rows >= 0 && shape.columns >= 0, "no length may be negative");
  require(left.count() == shape.sums * shape.terms * shape.rows, "the left side must be (N, T, rows)");
  require(right.count() == shape.sums * shape.terms * shape.columns, "the right side must be (N, T, columns)");
  const Matrix x = Matrix::of(left, shape.rows), y = Matrix::of(right, shape.columns);
  const auto write = [&](int64_t n, Added sum) {
    const bool finite = std::isfinite(sum.square) && std::isfinite(sum.size);
    squares[n] = finite ? sum.square : std::numeric_limits<double>::quiet_NaN();
    sizes[n] = finite ? sum.size : std::numeric_limits<double>::quiet_NaN();
  };
  const int64_t lengths = shape.rows + shape.columns, pairs = shape.sums * shape.terms * shape.terms;
  std::atomic<int64_t> next{0};
  if (shape.terms == 1) {
    on_threads(threads_worth(pairs * lengths, threads, kComputedByOne), [&](int) {
      for (int64_t n = next++; n < shape.sums; n = next++) {
        const double a = sum_of_squares(x, n), b = sum_of_squares(y, n);
        write(n, {a * b, std::sqrt(a) * std::sqrt(b)});
      }
    });
    return;
  }
  Grams grams(x, y, shape);
  on_threads(threads_worth(pairs / 2 * lengths, threads, kMultipliedByOne), [&](int) { grams.run(next); });
  for (int64_t n = 0; n < shape.sums; ++n) write(n, grams.sum(n));
}

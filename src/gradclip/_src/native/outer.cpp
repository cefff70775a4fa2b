#include "outer.hpp"

#include <algorithm>
#include <atomic>
#include <optional>
#include <stdexcept>

#include "matrices.hpp"

namespace {

// The rows (k) whose panels are multiplied at once, so that two panels fit in the first-level cache.
constexpr int64_t kDepth = 256;
// The totals that a thread computes at once, and the columns of `right` that it packs at once: together with the packed
// rows of `left`, they fit in the second-level cache.
constexpr int64_t kMostRows = 20 * kTileRows, kMostColumns = 32 * kTileColumns, kPacked = 8 * kTileColumns;
constexpr int64_t kFewestRows = 4 * kTileRows, kFewestColumns = 4 * kTileColumns;
// Multiplications and additions that are worth a thread.
constexpr int64_t kMultipliedByOne = int64_t{1} << 22;
// Without `left`, rows are added this many at a time, and the totals are columns of this many.
constexpr int64_t kAdded = 8, kSummedColumns = 2048;

struct Outer {
  std::optional<Matrix> left;
  Matrix right;
  OuterShape shape;
  int64_t depth;  // K
  double* totals;
  // The k whose weights are not 0, and these weights.
  std::vector<int64_t> kept;
  std::vector<double> weights;

  int64_t count() const { return static_cast<int64_t>(kept.size()); }
  double* total(int64_t block, int64_t row, int64_t column) const {
    return totals + (block * shape.rows + row) * shape.columns + column;
  }
  // The kept rows of a matrix from `first` on.
  std::vector<const void*> rows(const Matrix& matrix, int64_t block, int64_t first, int64_t count) const {
    std::vector<const void*> rows;
    for (int64_t i = first; i < first + count; ++i) rows.push_back(matrix.row(block * depth + kept[i]));
    return rows;
  }
};

// One thread's part of the work. Tiles have few rows of the first side and many columns of the second: which side is
// which does not change a product.
class Multiplication {
 public:
  Multiplication(const Outer& outer, int64_t most_rows)
      : outer_(outer),
        swapped_(is_narrow(outer.shape)),
        first_(rounded_up(swapped_ ? kTileRows : most_rows, kTileRows) * kDepth),
        second_(kPacked * kDepth) {}

  // Whether the second side is the left one.
  static bool is_narrow(const OuterShape& shape) { return shape.columns <= kTileRows && shape.rows > shape.columns; }

  void compute(int64_t block, Columns rows, Columns columns) {
    const Columns first = swapped_ ? columns : rows, second = swapped_ ? rows : columns;
    for (int64_t k = 0; k < outer_.count(); k += kDepth) {
      const int64_t depth = std::min(kDepth, outer_.count() - k);
      pack(swapped_, block, k, depth, first, kTileRows, first_.data());
      for (int64_t at = second.begin; at < second.end; at += kPacked) {
        const Columns packed = {at, std::min(second.end, at + kPacked)};
        pack(!swapped_, block, k, depth, packed, kTileColumns, second_.data());
        multiply(block, first, packed, depth, k > 0);
      }
    }
  }

 private:
  void pack(bool right, int64_t block, int64_t k, int64_t depth, Columns columns, int64_t width, double* to) const {
    const Matrix& matrix = right ? outer_.right : *outer_.left;
    const auto rows = outer_.rows(matrix, block, k, depth);
    matrix.kernels().pack({rows.data(), depth}, columns, right ? nullptr : &outer_.weights[k], width, to);
  }
  void multiply(int64_t block, Columns firsts, Columns seconds, int64_t depth, bool add) {
    const double* second = second_.data();
    for (int64_t j = seconds.begin; j < seconds.end; j += kTileColumns, second += depth * kTileColumns) {
      const double* first = first_.data();
      const int64_t width = std::min(kTileColumns, seconds.end - j);
      for (int64_t i = firsts.begin; i < firsts.end; i += kTileRows, first += depth * kTileRows) {
        const int64_t height = std::min(kTileRows, firsts.end - i);
        double* totals = swapped_ ? outer_.total(block, j, i) : outer_.total(block, i, j);
        if (width == kTileColumns && !swapped_ && height == kTileRows) {
          multiply_(first, second, depth, totals, outer_.shape.columns, height, add);
        } else {
          multiply_edge(first, second, depth, totals, height, width, add);
        }
      }
    }
  }
  void multiply_edge(const double* first, const double* second, int64_t depth, double* totals, int64_t height,
                     int64_t width, bool add) const {
    double tile[kTileRows * kTileColumns] = {};
    const int64_t down = swapped_ ? 1 : outer_.shape.columns, across = swapped_ ? outer_.shape.columns : 1;
    for (int64_t i = 0; add && i < height; ++i) {
      for (int64_t j = 0; j < width; ++j) tile[i * kTileColumns + j] = totals[i * down + j * across];
    }
    multiply_(first, second, depth, tile, kTileColumns, height, add);
    for (int64_t i = 0; i < height; ++i) {
      for (int64_t j = 0; j < width; ++j) totals[i * down + j * across] = tile[i * kTileColumns + j];
    }
  }

  const Outer& outer_;
  const decltype(Kernels::multiply) multiply_ = kernels_of(Dtype::float64).multiply;
  const bool swapped_;
  Buffer first_, second_;
};

// How the totals are divided among threads.
struct Steps {
  int64_t rows, columns;

  Steps(const OuterShape& shape, int threads)
      : rows(even(shape.rows, kMostRows, kTileRows)), columns(even(shape.columns, kMostColumns, kTileColumns)) {
    const int64_t wanted = threads > 1 ? 3 * threads : 1;
    while (pieces(shape) < wanted && (rows > kFewestRows || columns > kFewestColumns)) {
      const bool wide = columns > kFewestColumns && (rows <= kFewestRows || columns >= 2 * rows);
      wide ? columns = rounded_up(columns / 2, kTileColumns) : rows = rounded_up(rows / 2, kTileRows);
    }
  }
  int64_t across(const OuterShape& shape) const { return (shape.columns + columns - 1) / columns; }
  int64_t down(const OuterShape& shape) const { return (shape.rows + rows - 1) / rows; }
  int64_t pieces(const OuterShape& shape) const { return shape.blocks * down(shape) * across(shape); }

 private:
  // About equal steps of at most this length.
  static int64_t even(int64_t length, int64_t most, int64_t tile) {
    const int64_t steps = (length + most - 1) / most;
    return rounded_up((length + steps - 1) / steps, tile);
  }
};

// Calls `work`, made for each thread, with the index of each piece.
template <class Make>
void divide(int64_t pieces, int threads, const Make& make) {
  std::atomic<int64_t> next{0};
  on_threads(static_cast<int>(std::min<int64_t>(threads, pieces)), [&](int) {
    auto work = make();
    for (int64_t piece = next++; piece < pieces; piece = next++) work(piece);
  });
}

void multiply_all(const Outer& outer, int threads) {
  const OuterShape& shape = outer.shape;
  const Steps steps(shape, threads);
  const int64_t across = steps.across(shape), down = steps.down(shape);
  divide(steps.pieces(shape), threads, [&] {
    return [&, work = Multiplication(outer, std::min(steps.rows, shape.rows))](int64_t piece) mutable {
      const int64_t column = piece % across * steps.columns, row = piece / across % down * steps.rows;
      work.compute(piece / across / down, {row, std::min(shape.rows, row + steps.rows)},
                   {column, std::min(shape.columns, column + steps.columns)});
    };
  });
}

void add_all(const Outer& outer, int threads) {
  const int64_t across = (outer.shape.columns + kSummedColumns - 1) / kSummedColumns;
  divide(across * outer.shape.blocks, threads, [&] {
    return [&](int64_t piece) {
      const int64_t block = piece / across, at = piece % across * kSummedColumns;
      const int64_t width = std::min(kSummedColumns, outer.shape.columns - at);
      Matrix columns = outer.right;
      columns.data += at * item_size(columns.dtype);
      const auto rows = outer.rows(columns, block, 0, outer.count());
      double* totals = outer.total(block, 0, at);
      std::fill_n(totals, width, 0.0);
      for (int64_t i = 0; i < outer.count(); i += kAdded) {
        const int64_t count = std::min(kAdded, outer.count() - i), next = std::min(kAdded, outer.count() - i - count);
        columns.kernels().add_rows({&rows[i], count}, &outer.weights[i], {rows.data() + i + count, next}, totals, width);
      }
    };
  });
}

const double* numbers(const Arrays& arrays) {
  if (arrays.spans().at(0).dtype != Dtype::float64) throw std::invalid_argument("weights and totals must be float64");
  return reinterpret_cast<const double*>(arrays.spans()[0].data);
}

void require(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

Outer checked(const Arrays* left, const Arrays& right, const Arrays& weights, const Arrays& totals, OuterShape shape) {
  require(left || shape.rows == 1, "without a left side, there must be one row");
  require(totals.count() == shape.blocks * shape.rows * shape.columns, "totals must be blocks of rows times columns");
  const int64_t depth = right.count() / (shape.blocks * shape.columns), examples = weights.count();
  require(right.count() == shape.blocks * depth * shape.columns, "the right side must be blocks of rows of `columns`");
  require(!left || left->count() == shape.blocks * depth * shape.rows,
          "the left side must have as many rows, of length `rows`, as the right side");
  require(depth == 0 || (examples > 0 && depth % examples == 0), "each weight must be for equally many rows");
  Outer outer = {{}, Matrix::of(right, shape.columns), shape, depth, const_cast<double*>(numbers(totals)), {}, {}};
  if (left) outer.left = Matrix::of(*left, shape.rows);
  const double* of_examples = numbers(weights);
  for (int64_t k = 0; k < depth; ++k) {
    const double weight = of_examples[k / (depth / examples)];
    if (weight == 0.0) continue;
    outer.kept.push_back(k);
    outer.weights.push_back(weight);
  }
  return outer;
}

}  // namespace

void outer_sums(const Arrays* left, const Arrays& right, const Arrays& weights, const Arrays& totals, OuterShape shape,
                int threads) {
  if (shape.blocks <= 0 || shape.rows <= 0 || shape.columns <= 0) {
    require(shape.blocks >= 0 && shape.rows >= 0 && shape.columns >= 0, "no length may be negative");
    return require(totals.count() == 0, "totals must be blocks of rows times columns");
  }
  const Outer outer = checked(left, right, weights, totals, shape);
  if (!outer.count()) {
    std::fill_n(outer.totals, totals.count(), 0.0);
    return;
  }
  const int useful = threads_worth(totals.count() * outer.count(), threads, left ? kMultipliedByOne : kComputedByOne);
  left ? multiply_all(outer, useful) : add_all(outer, useful);
}

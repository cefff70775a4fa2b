#include "examples.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <limits>
#include <mutex>

namespace {

// Examples are added up in so many groups, and these in their order: the same bits on any number of threads.
constexpr std::size_t kGroups = 4;
// The examples of a block are in cache still when they are added.
constexpr int64_t kBlockBytes = int64_t{1} << 20;
constexpr std::size_t kSmallestBlock = 4, kLargestBlock = 64;
// A thread of its own for each group costs a copy of the totals: examples of more elements go by columns.
constexpr int64_t kLargestCopy = int64_t{1} << 21;

double weight_of(double square, const Weighing& weighing) {
  const double upper = std::sqrt(square) * weighing.inflate + weighing.offset;
  if (upper <= weighing.keep_up_to) return weighing.kept;
  // Not below the normal range, where it could be rounded up, and not so large that zeros become NaN.
  const double weight = upper == 0.0 ? 0.0 : weighing.numerator / upper;
  return weight < std::numeric_limits<double>::min() ? 0.0 : std::min(weight, 0x1p1022);
}

class Batch {
 public:
  Batch(const Arrays& arrays, std::size_t examples, const Weighing& weighing, double* squares)
      : spans_(as_real(arrays.spans())), weighing_(weighing), squares_(squares) {
    int64_t bytes = 0;
    for (Span& span : spans_) {
      span.count /= static_cast<int64_t>(examples);
      columns_ += span.count;
      bytes += span.count * item_size(span.dtype);
    }
    const auto fitting = static_cast<std::size_t>(kBlockBytes / std::max<int64_t>(1, bytes));
    block_ = std::clamp(fitting, kSmallestBlock, kLargestBlock);
  }

  int64_t columns() const { return columns_; }

  // Adds the examples from `first` to `last` to the totals, block by block, on so many threads.
  void add(std::size_t first, std::size_t last, double* totals, int threads) const {
    for (; first < last; first += block_) add_block(first, std::min(block_, last - first), totals, threads);
  }

 private:
  std::byte* row_of(const Span& span, std::size_t example) const {
    return span.data + static_cast<int64_t>(example) * span.count * item_size(span.dtype);
  }

  void add_block(std::size_t first, std::size_t count, double* totals, int threads) const {
    std::vector<std::size_t> rows;
    std::vector<double> weights;
    weigh(first, count, threads, rows, weights);
    if (rows.empty()) return;
    // Backward: what was read last is still in cache.
    const std::vector<Piece> pieces = cut(spans_);
    std::vector<int64_t> starts = {0};
    for (const Span& span : spans_) starts.push_back(starts.back() + span.count);
    share_out(pieces, threads, Order::backward, [&](std::size_t i) {
      const auto& [array, offset, columns] = pieces[i];
      const Span& span = spans_[array];
      const void* at[kLargestBlock];
      for (std::size_t k = 0; k < rows.size(); ++k) at[k] = row_of(span, rows[k]) + offset * item_size(span.dtype);
      kernels_of(span.dtype)
          .add_rows(at, weights.data(), static_cast<int64_t>(rows.size()), totals + starts[array] + offset, columns);
    });
  }

  // Measures examples; finds those that add something, and their weights.
  void weigh(std::size_t first, std::size_t count, int threads, std::vector<std::size_t>& rows,
             std::vector<double>& weights) const {
    Arrays block;
    std::vector<std::size_t> measured;
    for (std::size_t example = first; example < first + count; ++example) {
      if (std::isnan(squares_[example])) continue;
      measured.push_back(example);
      for (const Span& span : spans_) block.add(row_of(span, example), span.count, span.dtype);
    }
    if (measured.empty()) return;
    const std::vector<double> divisors(measured.size(), 1.0);
    const std::vector<Sum> sums = block.row_sums(measured.size(), 2.0, divisors, false, threads);
    for (std::size_t i = 0; i < measured.size(); ++i) {
      squares_[measured[i]] = sums[i].value;
      if (!std::isfinite(sums[i].value)) continue;
      rows.push_back(measured[i]);
      weights.push_back(weight_of(sums[i].value, weighing_));
    }
  }

  std::vector<Span> spans_;
  Weighing weighing_;
  double* squares_;
  std::size_t block_ = 0;
  int64_t columns_ = 0;
};

// Adds groups of examples on threads of their own, each to a copy of the totals, and the copies in order.
void add_groups(const Batch& batch, std::size_t examples, double* totals, int threads) {
  const std::size_t groups = std::min(kGroups, examples);
  std::vector<std::vector<double>> copies(static_cast<std::size_t>(threads));
  for (auto& copy : copies) copy.resize(static_cast<std::size_t>(batch.columns()));
  std::atomic<std::size_t> next{0};
  std::size_t added = 0;
  std::mutex mutex;
  std::condition_variable turn;
  on_threads(threads, [&](int thread) {
    std::vector<double>& copy = copies[static_cast<std::size_t>(thread)];
    for (std::size_t group = next++; group < groups; group = next++) {
      std::fill(copy.begin(), copy.end(), 0.0);
      batch.add(group * examples / groups, (group + 1) * examples / groups, copy.data(), 1);
      std::unique_lock lock(mutex);
      turn.wait(lock, [&] { return added == group; });
      for (std::size_t i = 0; i < copy.size(); ++i) totals[i] += copy[i];
      ++added;
      turn.notify_all();
    }
  });
}

}  // namespace

void add_examples(const Arrays& arrays, std::size_t examples, const Weighing& weighing, double* squares, double* totals,
                  int threads) {
  const Batch batch(arrays, examples, weighing, squares);
  if (batch.columns() > kLargestCopy) return batch.add(0, examples, totals, threads);
  const int useful = threads_worth(arrays.count(), std::min<int>(threads, kGroups));
  add_groups(batch, examples, totals, useful);
}

#include "examples.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <limits>
#include <mutex>
#include <numeric>
#include <thread>

#include "sum_in_order.hpp"

namespace {

// While the examples of one block are added, those of the next are measured, one tile of columns at a time.
constexpr int64_t kTile = 1024;
// A small block is still in cache when it is added. Large examples are added four at a time, because each block reads
// and writes the totals once. The largest are added in smaller blocks, as long as two blocks and the totals fit into a
// cache of this size.
constexpr int64_t kBlockBytes = int64_t{1} << 17, kCacheBytes = 20'000'000;
constexpr std::size_t kSmallestBlock = 2, kLargeBlock = 4, kLargestBlock = 64;
// Batches that do not fit are read twice. The second pass goes tile by tile, with the totals in cache.
constexpr int64_t kWideTile = 4096;
// Examples with few columns are divided among threads in this many groups. Each group is added up separately, then the
// groups in order. For larger examples, each thread takes some of the columns. Either way, the bits of a sum do not
// depend on the number of threads.
constexpr std::size_t kGroups = 4;
constexpr int64_t kFewColumns = int64_t{1} << 15;
// The number of column ranges a thread takes in a step, if no other thread is faster.
constexpr std::size_t kRangesForAThread = 2;
// A step takes less time than sleeping and waking up, so a thread checks this often before it sleeps.
constexpr int kTries = 1000;

double weight_of(double square, const Weighing& weighing) {
  const double upper = std::sqrt(square) * weighing.inflate + weighing.offset;
  if (upper <= weighing.keep_up_to) return weighing.kept;
  // Never subnormal, where it could have been rounded up, and never so large that zeros become NaN.
  const double weight = upper == 0.0 ? 0.0 : weighing.numerator / upper;
  return weight < std::numeric_limits<double>::min() ? 0.0 : std::min(weight, 0x1p1022);
}

// A batch of examples with the same elements, stored one after another.
class Batch {
 public:
  Batch(const Arrays& arrays, std::size_t examples, const Weighing& weighing, double* squares)
      : examples(examples), spans_(as_real(arrays.spans())), weighing_(weighing), squares_(squares) {
    for (Span& span : spans_) {
      span.count /= static_cast<int64_t>(examples);
      starts_.push_back(columns);
      columns += span.count;
      bytes += span.count * item_size(span.dtype);
    }
  }

  std::vector<Piece> cut_columns(int64_t length) const { return cut(spans_, length); }
  int64_t start(const Piece& columns) const { return starts_[columns.array] + columns.offset; }
  const void* at(const Piece& columns, std::size_t example) const {
    const Span& span = spans_[columns.array];
    return span.data + (static_cast<int64_t>(example) * span.count + columns.offset) * item_size(span.dtype);
  }
  const Kernels& kernels(const Piece& columns) const { return kernels_of(spans_[columns.array].dtype); }
  Sum sum(const Piece& columns, std::size_t example) const {
    // Even squares of half types are added in double: private sums rely on that error bound.
    return kernels(columns).sum(at(columns, example), columns.count, 2.0, 1.0, false);
  }

  bool left_out(std::size_t example) const { return std::isnan(squares_[example]); }
  void set_square(std::size_t example, double square) const { squares_[example] = square; }
  bool counts(std::size_t example) const { return std::isfinite(squares_[example]); }
  double weight(std::size_t example) const { return weight_of(squares_[example], weighing_); }

  const std::size_t examples;
  int64_t columns = 0, bytes = 0;

 private:
  std::vector<Span> spans_;
  std::vector<int64_t> starts_;
  Weighing weighing_;
  double* squares_;
};

// The number of examples in a block, or 0 if two blocks do not fit into cache.
std::size_t block_of(const Batch& batch) {
  const int64_t bytes = std::max<int64_t>(1, batch.bytes);
  const int64_t totals = batch.columns * static_cast<int64_t>(sizeof(double));
  const auto fitting = static_cast<std::size_t>(std::max<int64_t>(0, (kCacheBytes - totals) / (2 * bytes)));
  if (fitting < kSmallestBlock) return 0;
  return std::clamp(static_cast<std::size_t>(kBlockBytes / bytes), std::min(fitting, kLargeBlock), kLargestBlock);
}

// Examples and their weights.
struct Weighted {
  std::vector<std::size_t> examples;
  std::vector<double> weights;

  explicit Weighted(std::size_t most) { examples.reserve(most), weights.reserve(most); }
  void clear() {
    examples.clear();
    weights.clear();
  }
  // Adds those of the measured examples that are finite.
  void add(const Batch& batch, const std::vector<std::size_t>& measured) {
    for (const std::size_t example : measured) {
      if (!batch.counts(example)) continue;
      examples.push_back(example);
      weights.push_back(batch.weight(example));
    }
  }
};

// Adds the examples from `first` to `last` of a batch to the totals, block by block. Any number of threads can run this
// together. In each step they take ranges of tiles, and the last thread to finish weighs the measured examples. Others
// wait for it, so only the constructor takes memory and can throw.
class Addition {
 public:
  Addition(const Batch& batch, std::size_t block, int threads)
      : batch_(batch), tiles_(batch.cut_columns(kTile)), block_(block), sums_(tiles_.size() * block), added_(block) {
    const auto ranges = threads > 1 ? static_cast<std::size_t>(threads) * kRangesForAThread : 1;
    ranges_ = std::clamp<std::size_t>(ranges, 1, std::max<std::size_t>(1, tiles_.size()));
    measured_.reserve(block);
  }

  void start(std::size_t first, std::size_t last, double* totals) {
    next_ = first, last_ = last, totals_ = totals;
    steps_ = (last - first + block_ - 1) / block_ + 1;
    taken_ = done_ = step_ = 0;
    added_.clear();
    choose_next();
  }

  void run() {
    for (std::size_t taken = taken_++; taken < steps_ * ranges_; taken = taken_++) {
      const std::size_t step = taken / ranges_, range = taken % ranges_, tiles = tiles_.size();
      wait_for(step);
      for (std::size_t i = range * tiles / ranges_; i < (range + 1) * tiles / ranges_; ++i) work_on(i);
      if (++done_ == (step + 1) * ranges_) {
        weigh();
        step_ = step + 1;
        step_.notify_all();
      }
    }
  }

 private:
  void wait_for(std::size_t step) const {
    for (int tries = 0; tries < kTries && step_ != step; ++tries) std::this_thread::yield();
    for (std::size_t now = step_; now != step; now = step_) step_.wait(now);
  }

  void work_on(std::size_t index) {
    const Piece& tile = tiles_[index];
    const void *added[kLargestBlock], *measured[kLargestBlock];
    const auto count = static_cast<int64_t>(added_.examples.size()), next = static_cast<int64_t>(measured_.size());
    for (std::size_t i = 0; i < added_.examples.size(); ++i) added[i] = batch_.at(tile, added_.examples[i]);
    for (std::size_t i = 0; i < measured_.size(); ++i) measured[i] = batch_.at(tile, measured_[i]);
    if (count) {
      batch_.kernels(tile).add_rows({added, count}, added_.weights.data(), {measured, next},
                                    totals_ + batch_.start(tile), tile.count);
    }
    // `add_rows` has already fetched these into cache.
    for (std::size_t i = 0; i < measured_.size(); ++i) sums_[index * block_ + i] = batch_.sum(tile, measured_[i]);
  }

  // The examples just measured are added next.
  void weigh() {
    for (std::size_t i = 0; i < measured_.size(); ++i) {
      SumInOrder sum;
      for (std::size_t tile = 0; tile < tiles_.size(); ++tile) sum.add(sums_[tile * block_ + i]);
      batch_.set_square(measured_[i], sum.sum().value);
    }
    added_.clear();
    added_.add(batch_, measured_);
    choose_next();
  }

  void choose_next() {
    measured_.clear();
    for (const std::size_t end = std::min(last_, next_ + block_); next_ < end; ++next_) {
      if (!batch_.left_out(next_)) measured_.push_back(next_);
    }
  }

  const Batch& batch_;
  const std::vector<Piece> tiles_;
  const std::size_t block_;
  std::size_t next_ = 0, last_ = 0;
  double* totals_ = nullptr;
  std::vector<Sum> sums_;
  std::size_t steps_ = 0, ranges_ = 1;
  Weighted added_;
  std::vector<std::size_t> measured_;
  std::atomic<std::size_t> taken_{0}, done_{0}, step_{0};
};

void add_by_columns(const Batch& batch, std::size_t block, double* totals, int threads) {
  Addition addition(batch, block, threads);
  addition.start(0, batch.examples, totals);
  on_threads(threads, [&](int) { addition.run(); });
}

struct Copy {  // of the totals, for one thread
  Addition addition;
  std::vector<double> totals;
  Copy(const Batch& batch, std::size_t block)
      : addition(batch, block, 1), totals(static_cast<std::size_t>(batch.columns)) {}
  void add(std::size_t first, std::size_t last) {
    std::fill(totals.begin(), totals.end(), 0.0);
    addition.start(first, last, totals.data());
    addition.run();
  }
};

// Adds each group of examples on one thread to a copy of the totals, then adds the copies in order.
void add_by_groups(const Batch& batch, std::size_t block, double* totals, int threads) {
  const std::size_t groups = std::min(kGroups, batch.examples);
  std::deque<Copy> copies;
  for (int i = 0; i < threads; ++i) copies.emplace_back(batch, block);
  std::atomic<std::size_t> next{0};
  std::size_t added = 0;
  std::mutex mutex;
  std::condition_variable turn;
  on_threads(threads, [&](int thread) {
    Copy& copy = copies[static_cast<std::size_t>(thread)];
    for (std::size_t group = next++; group < groups; group = next++) {
      copy.add(group * batch.examples / groups, (group + 1) * batch.examples / groups);
      std::unique_lock lock(mutex);
      // Groups are started in order, so the group that others wait for is always in progress.
      turn.wait(lock, [&] { return added == group; });
      for (std::size_t i = 0; i < copy.totals.size(); ++i) totals[i] += copy.totals[i];
      ++added;
      turn.notify_all();
    }
  });
}

// Calls `work` with each index below `count`, on several threads.
template <class Work>
void for_each_index(std::size_t count, int threads, const Work& work) {
  std::atomic<std::size_t> next{0};
  on_threads(threads, [&](int) {
    for (std::size_t i = next++; i < count; i = next++) work(i);
  });
}

// Measures the examples array by array, in memory order.
void measure_all(const Batch& batch, int threads) {
  const std::vector<Piece> chunks = batch.cut_columns(kChunk);
  std::vector<std::size_t> ends;
  for (std::size_t i = 0; i < chunks.size(); ++i) {
    if (i + 1 == chunks.size() || chunks[i + 1].array != chunks[i].array) ends.push_back(i + 1);
  }
  std::vector<Sum> sums(chunks.size() * batch.examples);
  for_each_index(ends.size() * batch.examples, threads, [&](std::size_t index) {
    const std::size_t array = index / batch.examples, example = index % batch.examples;
    if (batch.left_out(example)) return;
    for (std::size_t i = array ? ends[array - 1] : 0; i < ends[array]; ++i) {
      sums[i * batch.examples + example] = batch.sum(chunks[i], example);
    }
  });
  for (std::size_t example = 0; example < batch.examples; ++example) {
    SumInOrder sum;
    for (std::size_t i = 0; i < chunks.size(); ++i) sum.add(sums[i * batch.examples + example]);
    if (!batch.left_out(example)) batch.set_square(example, sum.sum().value);
  }
}

void add_in_two_readings(const Batch& batch, double* totals, int threads) {
  measure_all(batch, threads);
  std::vector<std::size_t> all(batch.examples);
  std::iota(all.begin(), all.end(), std::size_t{0});
  Weighted added(batch.examples);
  added.add(batch, all);
  const std::vector<Piece> tiles = batch.cut_columns(kWideTile);
  const auto count = static_cast<int64_t>(added.examples.size());
  for_each_index(tiles.size(), threads, [&](std::size_t index) {
    const Piece& tile = tiles[index];
    const void* rows[2 * kLargeBlock];
    for (int64_t i = 0; i < count;) {
      const int64_t block = std::min<int64_t>(kLargeBlock, count - i), next = std::min(block, count - i - block);
      for (int64_t j = 0; j < block + next; ++j) rows[j] = batch.at(tile, added.examples[i + j]);
      batch.kernels(tile).add_rows({rows, block}, &added.weights[i], {rows + block, next},
                                   totals + batch.start(tile), tile.count);
      i += block;
    }
  });
}

}  // namespace

void add_examples(const Arrays& arrays, std::size_t examples, const Weighing& weighing, double* squares, double* totals,
                  int threads) {
  const Batch batch(arrays, examples, weighing, squares);
  const std::size_t block = block_of(batch);
  const bool few = batch.columns < kFewColumns;
  const int useful = threads_worth(arrays.count(), few ? std::min<int>(threads, kGroups) : threads, kComputedByOne);
  if (!block) return add_in_two_readings(batch, totals, useful);
  few ? add_by_groups(batch, block, totals, useful) : add_by_columns(batch, block, totals, useful);
}

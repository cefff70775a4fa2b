#include "rows.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace {

// Calls `work` with the number of each row, its memory, its array and where it begins there, in bytes. Rows are grouped
// into pieces of about one chunk.
template <class Work>
void for_each_row(const std::vector<Span>& spans, const RowCounts& counts, int threads, Order order, const Work& work) {
  std::vector<Piece> pieces;
  std::vector<int64_t> firsts, lengths;
  int64_t rows = 0;
  for (std::size_t i = 0; i < spans.size(); ++i) {
    const int64_t count = spans[i].count, length = counts.at(i) ? count / counts[i] : 0;
    if (length * counts[i] != count) {
      throw std::invalid_argument("an array cannot be cut into the given number of equal rows");
    }
    firsts.push_back(rows);
    lengths.push_back(length);
    rows += counts[i];
    const int64_t step = length ? std::max<int64_t>(1, kChunk / length) * length : 1;
    for (int64_t at = 0; at < count; at += step) pieces.push_back({i, at, std::min(step, count - at)});
  }
  share_out(pieces, threads_worth(pieces, threads, kComputedByOne), order, [&](std::size_t i) {
    const Piece& piece = pieces[i];
    const Span& span = spans[piece.array];
    const int64_t length = lengths[piece.array], bytes = length * item_size(span.dtype);
    int64_t row = firsts[piece.array] + piece.offset / length;
    int64_t at = piece.offset * item_size(span.dtype);
    for (int64_t left = piece.count / length; left > 0; --left, ++row, at += bytes) {
      work(row, Span{span.data + at, length, span.dtype}, piece.array, at);
    }
  });
}

double sum_of(const Span& row, double p) {
  SumInOrder sum;
  for (int64_t at = 0; at < row.count; at += kChunk) {
    const std::byte* data = row.data + at * item_size(row.dtype);
    sum.add(kernels_of(row.dtype).sum(data, std::min(kChunk, row.count - at), p, 1.0, false));
  }
  return sum.sum().value;
}

}  // namespace

void sum_rows(const Arrays& arrays, const RowCounts& counts, double p, double* sums, int threads) {
  // Rows without elements are never visited.
  std::fill_n(sums, std::accumulate(counts.begin(), counts.end(), int64_t{0}), 0.0);
  const std::vector<Span> spans = p == 2.0 ? as_real(arrays.spans()) : arrays.spans();
  for_each_row(spans, counts, threads, Order::forward,
               [=](int64_t i, const Span& row, std::size_t, int64_t) { sums[i] = sum_of(row, p); });
}

void scale_rows(const Arrays& arrays, const Arrays& to, const RowCounts& counts, const double* table, int threads) {
  const int64_t rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
  const std::vector<Span> into = as_real(to.spans());
  if (into.size() != arrays.spans().size()) throw std::invalid_argument("there must be a target for each array");
  const auto scale = [&](int64_t i, const Span& row, std::size_t array, int64_t at) {
    std::byte* target = into[array].data + at;
    if (table[i] != 0.0) {
      // Copied, not multiplied by 1, which would change subnormal numbers. What is in place may be read-only.
      if (target != row.data) std::memcpy(target, row.data, static_cast<std::size_t>(row.count * item_size(row.dtype)));
      return;
    }
    const double* factors = table + (row.dtype == Dtype::float64 ? 1 : 3) * rows + i;
    kernels_of(row.dtype).scale(row.data, target, row.count, factors[0], factors[rows]);
  };
  for_each_row(as_real(arrays.spans()), counts, threads, Order::backward, scale);
}

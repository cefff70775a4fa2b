// A plain read, and a plain read and write, of the same bytes on the same number of threads. Benchmarks compare
// clipping calls with it.
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

using Words __attribute__((vector_size(32), aligned(1), may_alias)) = uint64_t;

namespace {

constexpr int64_t kGrain = 1 << 21;

struct Piece {
  char* data;
  int64_t bytes;
};

uint64_t read_piece(const Piece& piece) {
  Words sums[4] = {};
  int64_t i = 0;
  for (; i + 128 <= piece.bytes; i += 128) {
    for (int j = 0; j < 4; ++j) sums[j] += *reinterpret_cast<const Words*>(piece.data + i + 32 * j);
  }
  const Words all = sums[0] + sums[1] + sums[2] + sums[3];
  return all[0] + all[1] + all[2] + all[3];
}

// `flip` is 0 at run time. The compiler would remove a literal 0.
void rewrite_piece(const Piece& piece, uint64_t flip) {
  for (int64_t i = 0; i + 32 <= piece.bytes; i += 32) *reinterpret_cast<Words*>(piece.data + i) ^= flip;
}

// In turns, as the kernels take them: a thread that starts late reads less.
template <class Work>
void on_threads(const std::vector<Piece>& pieces, int threads, const Work& work) {
  std::vector<std::thread> helpers;
  std::atomic<std::size_t> next{0};
  const auto take = [&] {
    for (std::size_t i = next++; i < pieces.size(); i = next++) work(i);
  };
  for (int which = 1; which < threads; ++which) helpers.emplace_back(take);
  take();
  for (auto& helper : helpers) helper.join();
}

std::vector<Piece> cut(char* const* data, const int64_t* bytes, int64_t count) {
  std::vector<Piece> pieces;
  for (int64_t array = 0; array < count; ++array) {
    for (int64_t at = 0; at < bytes[array]; at += kGrain) {
      pieces.push_back({data[array] + at, at + kGrain < bytes[array] ? kGrain : bytes[array] - at});
    }
  }
  return pieces;
}

}  // namespace

extern "C" uint64_t plain_read(char* const* data, const int64_t* bytes, int64_t count, int threads) {
  const std::vector<Piece> pieces = cut(data, bytes, count);
  std::vector<uint64_t> sums(pieces.size());
  on_threads(pieces, threads, [&](std::size_t i) { sums[i] = read_piece(pieces[i]); });
  uint64_t total = 0;
  for (const uint64_t sum : sums) total += sum;
  return total;
}

extern "C" void plain_rewrite(char* const* data, const int64_t* bytes, int64_t count, int threads, uint64_t flip) {
  const std::vector<Piece> pieces = cut(data, bytes, count);
  on_threads(pieces, threads, [&](std::size_t i) { rewrite_piece(pieces[i], flip); });
}

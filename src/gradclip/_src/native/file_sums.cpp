#include "file_sums.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <stdexcept>

#include "arrays.hpp"
#include "crc32.hpp"
#include "parallel.hpp"
#include "sum_in_order.hpp"

#if __has_include(<unistd.h>)
#include <unistd.h>

#include <cerrno>

bool reads_files() { return true; }
#else
bool reads_files() { return false; }
#endif

namespace {

// To ask the system takes some microseconds, as long as to read 100 KB. Much more at a time would leave the cache.
constexpr int64_t kAtOnce = int64_t{1} << 21, kDifferences = kChunk * static_cast<int64_t>(sizeof(double));
static_assert(kAtOnce % kDifferences == 0);

// Reads until the first failure of any thread.
class Reader {
 public:
  // Fills the memory. Returns whether all bytes were there.
  bool read(Place from, std::byte* to, int64_t size) {
#if __has_include(<unistd.h>)
    while (size > 0 && !failed_) {
      const ssize_t count = pread(from.file, to, static_cast<std::size_t>(size), from.offset);
      if (count < 0 && errno == EINTR) continue;
      if (count <= 0) {
        error_ = count < 0 ? errno : 0;
        failed_ = true;
      } else {
        to += count, size -= count, from.offset += count;
      }
    }
    return size == 0;
#else
    static_cast<void>(from), static_cast<void>(to);
    failed_ = true;
    return size == 0;
#endif
  }
  FileSums result(std::vector<double> sums, uint32_t checksum) const {
    return {std::move(sums), checksum, error_, failed_ && !error_};
  }

 private:
  std::atomic<bool> failed_ = false;
  std::atomic<int> error_ = 0;
};

struct Part {
  int64_t first;
  int64_t count;
};

// Calls `work` with the parts of a part, each of which has at most so many elements, while it returns true.
template <class Work>
void at_once(const Part& whole, int64_t most, const Work& work) {
  for (int64_t at = 0; at < whole.count; at += most) {
    if (!work(Part{whole.first + at, std::min(most, whole.count - at)})) return;
  }
}

// Bytes and their checksum.
struct Checked {
  int64_t size = 0;
  uint32_t checksum = 0;

  void add(const std::byte* bytes, int64_t count) {
    checksum = crc32(bytes, static_cast<std::size_t>(count), checksum);
    size += count;
  }
};

uint32_t joined(const std::vector<Checked>& parts) {
  uint32_t found = 0;
  for (const Checked& part : parts) found = crc32_joined(found, part.checksum, part.size);
  return found;
}

void add_chunks(const std::byte* data, int64_t count, const Asked& asked, Dtype dtype, SumInOrder& sum) {
  const Kernels& kernels = kernels_of(dtype);
  for (int64_t at = 0; at < count; at += kChunk) {
    sum.add(kernels.sum(data + at * item_size(dtype), std::min(kChunk, count - at), asked.p, 1.0, asked.in_float));
  }
}

int64_t pieces_of(const Asked& asked) {
  if (asked.count < 0 || asked.piece < 1 || asked.piece % kChunk || is_complex(asked.dtype)) {
    throw std::invalid_argument("real numbers are read, in pieces of whole chunks");
  }
  return (asked.count + asked.piece - 1) / asked.piece;
}

// Calls `add` with each piece, the sum to add it to, and memory of its thread.
template <class Add>
std::vector<double> sums_of_pieces(const Asked& asked, Room room, int64_t needed, int threads, const Add& add) {
  const int64_t pieces = pieces_of(asked), most = std::min(pieces, room.size / needed);
  if (most < std::min<int64_t>(pieces, 1)) throw std::invalid_argument("the memory to read into is too small");
  std::vector<double> sums(static_cast<std::size_t>(pieces));
  const int useful = std::min(threads_worth(asked.count, threads, kComputedByOne), static_cast<int>(most));
  if (pieces == 0) return sums;
  // No fixed shares: there may be fewer threads.
  std::atomic<int64_t> next{0};
  on_threads(useful, [&](int thread) {
    const DefaultArithmetic ours;
    for (int64_t i = next++; i < pieces; i = next++) {
      SumInOrder sum;
      const Part piece{i * asked.piece, std::min(asked.piece, asked.count - i * asked.piece)};
      add(piece, sum, room.data + thread * needed);
      sums[static_cast<std::size_t>(i)] = sum.sum().value;
    }
  });
  return sums;
}

Place moved(Place from, int64_t bytes) { return {from.file, from.offset + bytes}; }

}  // namespace

FileSums file_sums(Place from, const Asked& asked, Room room, bool checks, int threads) {
  const int64_t item = item_size(asked.dtype);
  Reader reader;
  std::vector<Checked> checked(checks ? static_cast<std::size_t>(pieces_of(asked)) : 0);
  auto sums = sums_of_pieces(asked, room, kAtOnce, threads, [&](const Part& piece, SumInOrder& sum, std::byte* memory) {
    at_once(piece, kAtOnce / item, [&](const Part& part) {
      const int64_t size = part.count * item;
      if (!reader.read(moved(from, part.first * item), memory, size)) return false;
      if (checks) checked[static_cast<std::size_t>(piece.first / asked.piece)].add(memory, size);
      add_chunks(memory, part.count, asked, asked.dtype, sum);
      return true;
    });
  });
  return reader.result(std::move(sums), joined(checked));
}

FileSums difference_sums(Place from, Place other, const Asked& asked, Room room, int threads) {
  const int64_t item = item_size(asked.dtype);
  Reader reader;
  const int64_t needed = 2 * kAtOnce + kDifferences;
  auto sums = sums_of_pieces(asked, room, needed, threads, [&](const Part& piece, SumInOrder& sum, std::byte* memory) {
    std::byte *left = memory, *right = left + kAtOnce, *difference = right + kAtOnce;
    at_once(piece, kAtOnce / item, [&](const Part& part) {
      const int64_t offset = part.first * item, size = part.count * item;
      if (!reader.read(moved(from, offset), left, size) || !reader.read(moved(other, offset), right, size)) return false;
      at_once({0, part.count}, kChunk, [&](const Part& chunk) {
        const int64_t at = chunk.first * item;
        kernels_of(asked.dtype).subtract(left + at, right + at, reinterpret_cast<double*>(difference), chunk.count);
        add_chunks(difference, chunk.count, asked, Dtype::float64, sum);
        return true;
      });
      return true;
    });
  });
  return reader.result(std::move(sums), 0);
}

FileSums byte_counts(Place from, int64_t count, Room room, bool checks) {
  constexpr int64_t kTables = 4;  // so that bytes that are alike wait for each other less
  if (room.size < kAtOnce) throw std::invalid_argument("the memory to read into is too small");
  Reader reader;
  Checked checked;
  std::vector<double> counts(256);
  at_once({0, count}, kAtOnce, [&](const Part& part) {
    if (!reader.read(moved(from, part.first), room.data, part.count)) return false;
    if (checks) checked.add(room.data, part.count);
    std::array<std::array<uint32_t, 256>, kTables> tables = {};
    const auto* bytes = reinterpret_cast<const uint8_t*>(room.data);
    int64_t i = 0;
    for (; i + kTables <= part.count; i += kTables) {
      for (int64_t table = 0; table < kTables; ++table) ++tables[table][bytes[i + table]];
    }
    for (; i < part.count; ++i) ++tables[0][bytes[i]];
    for (std::size_t byte = 0; byte < counts.size(); ++byte) {
      for (const auto& table : tables) counts[byte] += table[byte];
    }
    return true;
  });
  return reader.result(std::move(counts), checked.checksum);
}

#include "parallel.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <exception>

namespace {

constexpr int64_t kBatch = 8 * kChunk;
// The overhead of a piece, in elements. Without it, thousands of small tensors would look like no work.
constexpr int64_t kPiece = 256;

// The indices where batches of about `kBatch` elements start, and the end.
std::vector<std::size_t> batches_of(const std::vector<Piece>& pieces) {
  std::vector<std::size_t> starts;
  int64_t elements = kBatch;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (elements >= kBatch) {
      starts.push_back(i);
      elements = 0;
    }
    elements += kPiece + pieces[i].count;
  }
  starts.push_back(pieces.size());
  return starts;
}

// The work of one call. The first exception of any of its threads is kept for the thread that called.
class Shared {
 public:
  explicit Shared(const std::function<void(int)>& work) : work_(work) {}

  void run(int thread) noexcept {
    // A new thread inherits rounding and flushing from the one that called, which may have changed them.
    const DefaultArithmetic scope;
    try {
      work_(thread);
    } catch (...) {
      if (!failed_.test_and_set()) error_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

 private:
  const std::function<void(int)>& work_;
  std::atomic_flag failed_;
  std::exception_ptr error_;
};

// Not `std::thread`: if the system has no more threads, it throws, and even that takes memory.
struct Helper {
  pthread_t thread;
  Shared* shared;
  int number;

  bool start() {
    const auto run = [](void* started) -> void* {
      const auto* self = static_cast<Helper*>(started);
      self->shared->run(self->number);
      return nullptr;
    };
    return pthread_create(&thread, nullptr, run, this) == 0;
  }
};

}  // namespace

std::vector<Piece> cut(const std::vector<Span>& spans, int64_t length) {
  std::vector<Piece> pieces;
  pieces.reserve(spans.size());
  for (std::size_t array = 0; array < spans.size(); ++array) {
    for (int64_t offset = 0; offset < spans[array].count; offset += length) {
      pieces.push_back({array, offset, std::min(length, spans[array].count - offset)});
    }
  }
  return pieces;
}

int threads_worth(int64_t elements, int threads, int64_t by_one) {
  return static_cast<int>(std::clamp<int64_t>(elements / by_one, 1, std::max(1, threads)));
}

int threads_worth(const std::vector<Piece>& pieces, int threads, int64_t by_one) {
  int64_t elements = 0;
  for (const Piece& piece : pieces) elements += kPiece + piece.count;
  return threads_worth(elements, threads, by_one);
}

// Starts new threads for each call. A forked child would not have the threads of a pool, and would wait for them
// forever. Threads that spin between calls would take processors from others.
void on_threads(int threads, const std::function<void(int)>& work) {
  Shared shared(work);
  std::vector<Helper> helpers;
  for (int i = 1; i < threads; ++i) helpers.push_back({{}, &shared, i});
  // If no more threads are available, those already started, and this one, do all the work.
  const auto started = std::find_if_not(helpers.begin(), helpers.end(), [](Helper& helper) { return helper.start(); });
  shared.run(0);
  std::for_each(helpers.begin(), started, [](Helper& helper) { pthread_join(helper.thread, nullptr); });
  shared.rethrow();
}

void share_out(const std::vector<Piece>& pieces, int threads, Order order,
               const std::function<void(std::size_t)>& work) {
  const std::vector<std::size_t> starts = batches_of(pieces);
  const std::size_t batches = starts.size() - 1;
  // No fixed shares: if one thread is delayed, the others take its batches.
  std::atomic<std::size_t> next{0};
  on_threads(threads, [&](int) {
    for (std::size_t taken = next++; taken < batches; taken = next++) {
      const std::size_t batch = order == Order::forward ? taken : batches - 1 - taken;
      for (std::size_t i = starts[batch]; i < starts[batch + 1]; ++i) work(i);
    }
  });
}

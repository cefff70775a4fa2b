#include "parallel.hpp"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>

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

// The work of one call, and who takes part. It lives as long as somebody holds it, because a helper may come late.
class Shared {
 public:
  explicit Shared(const std::function<void(int)>& work) : work_(work) {}

  void hold() { ++holders_; }
  void let_go() {
    if (--holders_ == 0) delete this;
  }

  // Takes part, unless the call has ended.
  void help() noexcept {
    int number = 0;
    {
      const std::lock_guard lock(mutex_);
      if (ended_) return;
      number = ++entered_;
      ++running_;
    }
    run(number);
    const std::lock_guard lock(mutex_);
    if (--running_ == 0) left_.notify_one();
  }

  // Does what there is to do, then waits for those that have come. Nobody else comes in then.
  void lead() {
    run(0);
    std::unique_lock lock(mutex_);
    ended_ = true;
    left_.wait(lock, [this] { return running_ == 0; });
  }

  std::exception_ptr error() const { return error_; }

 private:
  void run(int thread) noexcept {
    // A new thread inherits rounding and flushing from the one that called, which may have changed them.
    const DefaultArithmetic scope;
    try {
      work_(thread);
    } catch (...) {
      if (!failed_.test_and_set()) error_ = std::current_exception();
    }
  }

  const std::function<void(int)>& work_;
  std::atomic<int> holders_{1};
  std::mutex mutex_;
  std::condition_variable left_;
  bool ended_ = false;
  int entered_ = 0, running_ = 0;
  std::atomic_flag failed_;
  std::exception_ptr error_;
};

// Not `std::thread`: if the system has no more threads, it throws, and even that takes memory.
bool started(Shared* shared) {
  const auto run = [](void* given) -> void* {
    auto* const shared = static_cast<Shared*>(given);
    shared->help();
    shared->let_go();
    return nullptr;
  };
  pthread_t thread;
  if (pthread_create(&thread, nullptr, run, shared) != 0) return false;
  pthread_detach(thread);
  return true;
}

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
// forever. Threads that spin between calls would take processors from others. A thread is not waited for before it has
// come: on a busy machine that takes longer than the work, which those that have come, and this one, do.
void on_threads(int threads, const std::function<void(int)>& work) {
  auto* const shared = new Shared(work);
  for (int i = 1; i < threads; ++i) {
    shared->hold();
    if (started(shared)) continue;
    shared->let_go();  // there are no more threads
    break;
  }
  shared->lead();
  const std::exception_ptr error = shared->error();
  shared->let_go();
  if (error) std::rethrow_exception(error);
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

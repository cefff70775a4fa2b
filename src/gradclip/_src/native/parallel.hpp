// Divide the chunks of many arrays among the threads of one call.
#pragma once

#include <cfenv>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <vector>

#include "kernels.hpp"

// Sets default rounding and subnormal handling, whatever the caller has set for its thread. The proven error bounds
// require it.
class DefaultArithmetic {
 public:
  DefaultArithmetic() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultArithmetic() { std::fesetenv(&callers_); }
  DefaultArithmetic(const DefaultArithmetic&) = delete;
  DefaultArithmetic& operator=(const DefaultArithmetic&) = delete;

 private:
  std::fenv_t callers_;
};

// A thread's first exception takes memory for thread-local data, without which glibc ends the process. This takes that
// memory before anything large is asked for, so that a lack of memory is an exception.
struct ReadyToThrow {
  ReadyToThrow() { static_cast<void>(std::current_exception()); }
};

// An array that is dense in memory, in any order.
struct Span {
  std::byte* data;
  int64_t count;
  Dtype dtype;
};

// A chunk of one of the arrays.
struct Piece {
  std::size_t array;
  int64_t offset;
  int64_t count;
};

// Cuts each array at multiples of `length`.
std::vector<Piece> cut(const std::vector<Span>& spans, int64_t length = kChunk);

enum class Order { forward, backward };

// The elements that are worth a thread: one core takes several times as long for them as a thread takes to start. They
// are more if they are only read, or scaled, and fewer if there is much to compute, or if they are read from a file.
constexpr int64_t kReadByOne = int64_t{1} << 21, kComputedByOne = int64_t{1} << 19;

// The number of threads worth starting for this many elements, if `by_one` are worth a thread.
int threads_worth(int64_t elements, int threads, int64_t by_one);
int threads_worth(const std::vector<Piece>& pieces, int threads, int64_t by_one);

// Calls `work` with 0, 1, ... on this many threads (including this one), or as many as come before it has ended here. No
// call of `work` outlasts this. Then the first exception of any of them is thrown. Threads that wait for each other must
// not throw.
void on_threads(int threads, const std::function<void(int)>& work);

// Calls `work` with the index of each piece, on this many threads or fewer, which end with this call. Pieces are taken
// in batches, in the given order. Any thread can take any batch, so store results by index.
void share_out(const std::vector<Piece>& pieces, int threads, Order order, const std::function<void(std::size_t)>& work);

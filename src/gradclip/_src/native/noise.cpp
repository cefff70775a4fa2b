#include "noise.hpp"

#include <stdexcept>

namespace {

// Words are no doubles, but no kernel loads them as such.
template <class Integer>
Integer* integers_of(const Arrays& arrays) {
  const std::vector<Span> spans = arrays.spans();
  if (spans.size() != 1 || spans[0].dtype != Dtype::float64) throw std::invalid_argument("one array of 8 bytes each");
  return reinterpret_cast<Integer*>(spans[0].data);
}

}  // namespace

NoiseProgress add_noise(const NoiseTarget& target, const Arrays& words, const Arrays& values, const Arrays& sums,
                        NoiseProgress from) {
  const DefaultArithmetic ours;
  const int64_t attempts = words.count() / 2, count = values.count();
  if (target.bits < 0 || target.bits > 60 || sums.count() != count || from.used < 0 || from.used > attempts ||
      from.filled < 0 || from.filled > count) {
    throw std::invalid_argument("noise is for sums of as many values, from a place within them, with 60 bits at most");
  }
  const auto* first = integers_of<const uint64_t>(words) + from.used;
  const auto made = kernels_of(Dtype::float64)
                        .noise(target, first, first + attempts, attempts - from.used,
                               integers_of<const int64_t>(values) + from.filled,
                               integers_of<int64_t>(sums) + from.filled, count - from.filled);
  return {from.used + made.used, from.filled + made.filled};
}

#include <array>
#include <stdexcept>

#include "gram.hpp"
#include "outer.hpp"
#include "xla.hpp"
#include "xla_call.hpp"

namespace {

using Dims = std::array<int64_t, 3>;

Dims dims_of_three(const xla_ffi::Buffer& buffer) {
  if (buffer.rank != 3) throw std::invalid_argument("a side of the products must have three axes");
  return {buffer.dims[0], buffer.dims[1], buffer.dims[2]};
}

Arrays array_of(const xla_ffi::Buffer& buffer) {
  Arrays arrays;
  arrays.add(buffer.data, xla_ffi::product(xla_ffi::dims_of(buffer)), xla_ffi::dtype_of(buffer.dtype));
  return arrays;
}

void check_alike(const Dims& left, const Dims& right) {
  if (left[0] != right[0] || left[1] != right[1]) throw std::invalid_argument("the sides do not match");
}

void outer(const xla_ffi::Call& call) {
  const int64_t count = call.arguments.count;
  if ((count != 2 && count != 3) || call.results.count != 1) {
    throw std::invalid_argument("there must be one or two sides, weights and one result");
  }
  xla_ffi::Buffer** given = call.arguments.buffers;
  const xla_ffi::Buffer &right = *given[count - 2], &weights = *given[count - 1];
  const Dims of_right = dims_of_three(right), of_left = count == 3 ? dims_of_three(*given[0]) : Dims{of_right[0], of_right[1], 1};
  check_alike(of_left, of_right);
  const Arrays left = array_of(*given[0]);
  outer_sums(count == 3 ? &left : nullptr, array_of(right), array_of(weights), array_of(*call.results.buffers[0]),
             {of_right[0], of_left[2], of_right[2]}, xla_ffi::threads_of(call));
}

void gram(const xla_ffi::Call& call) {
  if (call.arguments.count != 2 || call.results.count != 2) {
    throw std::invalid_argument("there must be two sides and two results");
  }
  const xla_ffi::Buffer &left = *call.arguments.buffers[0], &right = *call.arguments.buffers[1];
  const Dims of_left = dims_of_three(left), of_right = dims_of_three(right);
  check_alike(of_left, of_right);
  const auto squares = xla_ffi::numbers_of(*call.results.buffers[0]), sizes = xla_ffi::numbers_of(*call.results.buffers[1]);
  const auto sums = static_cast<std::size_t>(of_left[0]);
  if (squares.size() != sums || sizes.size() != sums) {
    throw std::invalid_argument("each result must have one number for each sum");
  }
  gram_squares(array_of(left), array_of(right), {of_left[0], of_left[1], of_left[2], of_right[2]}, squares.data(),
               sizes.data(), xla_ffi::threads_of(call));
}

}  // namespace

xla_ffi::Error* xla_outer_sums(xla_ffi::Call* call) { return xla_ffi::run(call, outer); }

xla_ffi::Error* xla_gram_squares(xla_ffi::Call* call) { return xla_ffi::run(call, gram); }

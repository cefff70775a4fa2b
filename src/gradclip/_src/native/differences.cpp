#include "differences.hpp"

#include <stdexcept>

void subtract(const Arrays& arrays, const Arrays& others, const Arrays& to) {
  const DefaultArithmetic ours;
  const std::vector<Span> left = as_real(arrays.spans()), right = as_real(others.spans()), into = as_real(to.spans());
  if (left.size() != right.size() || left.size() != into.size()) throw std::invalid_argument("numbers of arrays differ");
  for (std::size_t i = 0; i < left.size(); ++i) {
    const Dtype dtype = left[i].dtype;
    const int64_t count = left[i].count;
    if (right[i].dtype != dtype || into[i].dtype != Dtype::float64 || right[i].count != count || into[i].count != count) {
      throw std::invalid_argument("two arrays of one dtype and size are subtracted, into one of doubles");
    }
    kernels_of(dtype).subtract(left[i].data, right[i].data, reinterpret_cast<double*>(into[i].data), count);
  }
}

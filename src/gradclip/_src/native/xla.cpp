#include "xla.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "arrays.hpp"
#include "examples.hpp"
#include "xla_call.hpp"

using xla_ffi::dims_of, xla_ffi::dtype_of, xla_ffi::numbers_of, xla_ffi::product, xla_ffi::real_attribute,
    xla_ffi::threads_of;

namespace {

// The results of a call: one number for each row.
struct Results {
  std::span<const int64_t> dims;
  std::size_t rows;
  double* first;
  double* second;
};

Results results_of(const xla_ffi::Call& call) {
  if (call.results.count != 2) throw std::invalid_argument("there must be two results");
  xla_ffi::Buffer **buffers = call.results.buffers, &first = *buffers[0], &second = *buffers[1];
  const auto rows = static_cast<std::size_t>(product(dims_of(first)));
  const bool wide = first.dtype == xla_ffi::kFloat64 && second.dtype == xla_ffi::kFloat64;
  if (!wide || static_cast<std::size_t>(product(dims_of(second))) != rows) {
    throw std::invalid_argument("both results must be float64 with the same number of rows");
  }
  return {dims_of(first), rows, static_cast<double*>(first.data), static_cast<double*>(second.data)};
}

// One of the arrays, and how rows of the results correspond to its rows.
class Rows {
 public:
  Rows(const xla_ffi::Buffer& buffer, std::span<const int64_t> dims) : dims_(dims), dtype_(dtype_of(buffer.dtype)) {
    const std::span<const int64_t> own = dims_of(buffer);
    bool fits = own.size() >= dims.size();
    for (std::size_t axis = 0; fits && axis < dims.size(); ++axis) fits = own[axis] == 1 || own[axis] == dims[axis];
    if (!fits) throw std::invalid_argument("the leading axes of an array do not match the results");
    data_ = static_cast<std::byte*>(buffer.data);
    own_ = own.first(dims.size());
    count_ = product(own.subspan(dims.size()));
    bytes_ = count_ * kItemSizes[static_cast<std::size_t>(dtype_)];
  }
  void add_to(Arrays& arrays, int64_t row) const { arrays.add(data_ + index_of(row) * bytes_, count_, dtype_); }

 private:
  int64_t index_of(int64_t row) const {
    int64_t index = 0, stride = 1;
    for (std::size_t axis = dims_.size(); axis-- > 0; row /= dims_[axis]) {
      // An axis of length 1 means equal rows: `vmap` leaves it for arrays that are not mapped.
      if (own_[axis] != 1) index += row % dims_[axis] * stride;
      stride *= own_[axis];
    }
    return index;
  }

  std::span<const int64_t> dims_, own_;
  Dtype dtype_;
  std::byte* data_;
  int64_t count_, bytes_;
};

// The arrays, row by row.
Arrays arrays_of(const xla_ffi::Call& call, const Results& results) {
  std::vector<Rows> all;
  for (int64_t i = 0; i < call.arguments.count; ++i) all.emplace_back(*call.arguments.buffers[i], results.dims);
  Arrays arrays;
  for (std::size_t row = 0; row < results.rows; ++row) {
    for (const Rows& rows : all) rows.add_to(arrays, static_cast<int64_t>(row));
  }
  return arrays;
}

// Computes the sums without a divisor. Returns which rows must be summed again with one.
std::vector<bool> plain_sums(const Arrays& arrays, const Results& results, double p, double enough, int threads) {
  std::vector<bool> again(results.rows, true);
  // No sum can be large enough, so do not read at all.
  if (std::isinf(enough)) return again;
  const std::vector<Sum> sums = arrays.row_sums(results.rows, p, std::vector<double>(results.rows, 1.0), arrays.only_halves(), threads);
  for (std::size_t row = 0; row < results.rows; ++row) {
    const Sum& sum = sums[row];
    results.first[row] = sum.value;
    results.second[row] = 1.0;
    again[row] = !sum.nonfinite && !(sum.value > enough && std::isfinite(sum.value));
  }
  return again;
}

void divided_sums(const Arrays& arrays, const Results& results, double p, const std::vector<bool>& again, int threads) {
  const std::vector<Extremes> extremes = arrays.row_extremes(results.rows, threads);
  std::vector<double> divisors(results.rows, 0.0);
  for (std::size_t row = 0; row < results.rows; ++row) {
    const double largest = extremes[row].largest;
    // Never subnormal, because XLA's code would read it as zero.
    const double divisor = std::max(largest, std::numeric_limits<double>::min());
    if (again[row]) divisors[row] = std::isfinite(largest) && largest > 0.0 ? divisor : 1.0;
  }
  const std::vector<Sum> sums = arrays.row_sums(results.rows, p, divisors, false, threads);
  for (std::size_t row = 0; row < results.rows; ++row) {
    if (!again[row]) continue;
    results.first[row] = sums[row].value;
    results.second[row] = divisors[row];
  }
}

void power_sums(const xla_ffi::Call& call) {
  const Results results = results_of(call);
  const Arrays arrays = arrays_of(call, results);
  const double p = real_attribute(call, "p"), enough = real_attribute(call, "enough");
  const int threads = threads_of(call);
  const std::vector<bool> again = plain_sums(arrays, results, p, enough, threads);
  if (std::find(again.begin(), again.end(), true) == again.end()) return;
  divided_sums(arrays, results, p, again, threads);
}

void extremes(const xla_ffi::Call& call) {
  const Results results = results_of(call);
  const Arrays arrays = arrays_of(call, results);
  const std::vector<Extremes> found = arrays.row_extremes(results.rows, threads_of(call));
  for (std::size_t row = 0; row < results.rows; ++row) {
    results.first[row] = found[row].largest;
    results.second[row] = found[row].nonfinite ? std::numeric_limits<double>::quiet_NaN() : found[row].smallest;
  }
}

void examples(const xla_ffi::Call& call) {
  if (call.arguments.count < 2 || call.results.count != 2) throw std::invalid_argument("there must be two results");
  xla_ffi::Buffer** given = call.arguments.buffers;
  const std::span<double> weighing = numbers_of(*given[0]), included = numbers_of(*given[1]);
  const std::span<double> squares = numbers_of(*call.results.buffers[0]), totals = numbers_of(*call.results.buffers[1]);
  Arrays arrays;
  int64_t columns = 0;
  const auto rows = static_cast<int64_t>(included.size());
  for (int64_t i = 2; i < call.arguments.count; ++i) {
    const Dtype dtype = dtype_of(given[i]->dtype);
    const int64_t count = product(dims_of(*given[i]));
    arrays.add(given[i]->data, count, dtype);
    columns += rows ? count / rows * (is_complex(dtype) ? 2 : 1) : 0;
  }
  if (weighing.size() != 5 || squares.size() != included.size() || static_cast<int64_t>(totals.size()) < columns) {
    throw std::invalid_argument("the sizes of the results do not match the examples");
  }
  // The results' memory is uninitialized. The kernel reads its marks and adds to the totals.
  std::copy(included.begin(), included.end(), squares.begin());
  std::fill(totals.begin(), totals.end(), 0.0);
  if (!rows) return;
  const Weighing by = {weighing[0], weighing[1], weighing[2], weighing[3], weighing[4]};
  add_examples(arrays, included.size(), by, squares.data(), totals.data(), threads_of(call));
}

std::size_t size_of(xla_ffi::DataType type) {
  switch (type) {
    case xla_ffi::kBool: return 1;
    case xla_ffi::kFloat32: return 4;
    case xla_ffi::kFloat64: return 8;
    default: throw std::invalid_argument("entries must be booleans, float32 or float64");
  }
}

// Returns the entries of vectors as scalars: first those of the first vector, then those of the second, and so on. All
// leading axes are rows.
void entries(const xla_ffi::Call& call) {
  int64_t result = 0;
  for (int64_t i = 0; i < call.arguments.count; ++i) {
    const xla_ffi::Buffer& vector = *call.arguments.buffers[i];
    const std::size_t bytes = size_of(vector.dtype);
    const int64_t length = vector.rank ? vector.dims[vector.rank - 1] : 0;
    const int64_t rows = length ? product(dims_of(vector)) / length : 0;
    const auto* from = static_cast<const std::byte*>(vector.data);
    for (int64_t entry = 0; entry < length; ++entry, ++result) {
      if (result >= call.results.count) throw std::invalid_argument("there are fewer results than entries");
      const xla_ffi::Buffer& scalar = *call.results.buffers[result];
      if (scalar.dtype != vector.dtype || product(dims_of(scalar)) != rows) {
        throw std::invalid_argument("a result must have the type and the number of rows of its entry");
      }
      auto* to = static_cast<std::byte*>(scalar.data);
      for (int64_t row = 0; row < rows; ++row) {
        std::memcpy(to + static_cast<std::size_t>(row) * bytes,
                    from + static_cast<std::size_t>(row * length + entry) * bytes, bytes);
      }
    }
  }
  if (result != call.results.count) throw std::invalid_argument("there are more results than entries");
}

}  // namespace

xla_ffi::Error* xla_power_sums(xla_ffi::Call* call) { return xla_ffi::run(call, power_sums); }

xla_ffi::Error* xla_extremes(xla_ffi::Call* call) { return xla_ffi::run(call, extremes); }

xla_ffi::Error* xla_entries(xla_ffi::Call* call) { return xla_ffi::run(call, entries); }

xla_ffi::Error* xla_add_examples(xla_ffi::Call* call) { return xla_ffi::run(call, examples); }

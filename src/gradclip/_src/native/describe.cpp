#include "describe.hpp"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <numeric>
#include <optional>
#include <string_view>

#include "dlpack.hpp"

namespace nb = nanobind;

namespace {

struct Axis {
  int64_t length;
  int64_t stride;
};

// One array: its axes from last to first, with strides in units of `unit` bytes. All arrays of a call reuse one layout,
// so that describing thousands of small tensors allocates nothing for each.
struct Layout {
  std::byte* data;
  Dtype dtype;
  std::vector<Axis> axes;
  int64_t unit;
  bool in_order;
  bool writable;

  void start(std::byte* at, Dtype of, int64_t bytes, bool may_write) {
    data = at;
    dtype = of;
    unit = bytes;
    axes.clear();
    writable = may_write;
  }
};

bool lies_in_order(const Layout& layout, int64_t item) {
  int64_t expected = item;
  for (const Axis& axis : layout.axes) {
    // The stride of an axis of length 1 is never used, so it can be any number.
    if (axis.length == 1) continue;
    if (axis.stride * layout.unit != expected) return false;
    expected *= axis.length;
  }
  return true;
}

// Whether an array in a different order fills a contiguous stretch of memory, each place once. Moves `data` to its
// start.
bool fills_a_run(Layout& layout, int64_t item) {
  std::erase_if(layout.axes, [](const Axis& axis) { return axis.length == 1; });
  const auto by_stride = [](const Axis& a, const Axis& b) { return std::abs(a.stride) < std::abs(b.stride); };
  std::sort(layout.axes.begin(), layout.axes.end(), by_stride);
  int64_t expected = item;
  for (const Axis& axis : layout.axes) {
    if (std::abs(axis.stride) * layout.unit != expected) return false;
    if (axis.stride < 0) layout.data += (axis.length - 1) * axis.stride * layout.unit;
    expected *= axis.length;
  }
  return true;
}

// No memory starts below this. For a tensor without memory, the address is just its offset, which may be a small
// number.
constexpr std::uintptr_t kLowestAddress = 65536;

// The lowest address and the number of elements, if they fill a contiguous stretch of memory, each place once.
std::optional<Span> dense_span(Layout& layout) {
  const int64_t item = kItemSizes[static_cast<std::size_t>(layout.dtype)];
  int64_t count = 1;
  for (const Axis& axis : layout.axes) count *= axis.length;
  layout.in_order = count == 0 || lies_in_order(layout, item);
  if (count == 0) return Span{nullptr, 0, layout.dtype};
  if (reinterpret_cast<std::uintptr_t>(layout.data) < kLowestAddress) return std::nullopt;
  if (!layout.in_order && !fills_a_run(layout, item)) return std::nullopt;
  // Numbers are read as C++ objects, which must be aligned. Complex numbers are read as two parts.
  const int64_t alignment = is_complex(layout.dtype) ? item / 2 : item;
  if (reinterpret_cast<std::uintptr_t>(layout.data) % static_cast<std::uintptr_t>(alignment)) return std::nullopt;
  return Span{layout.data, count, layout.dtype};
}

std::optional<Dtype> dtype_of_format(std::string_view format) {
  // NumPy marks the non-native byte order with ">". The kernels do not support it, so such arrays are left out.
  if (!format.empty() && std::string_view("@=<").find(format.front()) != std::string_view::npos) {
    format.remove_prefix(1);
  }
  if (format == "f") return Dtype::float32;
  if (format == "d") return Dtype::float64;
  if (format == "e") return Dtype::float16;
  if (format == "H") return Dtype::bfloat16;
  if (format == "Zf") return Dtype::complex64;
  if (format == "Zd") return Dtype::complex128;
  return std::nullopt;
}

std::optional<Span> span_of_buffer(PyObject* array, Layout& layout) {
  Py_buffer view;
  // Do not request a writable buffer, because a norm only reads. A failure is not an error: Python falls back.
  if (PyObject_GetBuffer(array, &view, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  std::optional<Span> span;
  if (const auto dtype = dtype_of_format(view.format ? view.format : "B")) {
    layout.start(static_cast<std::byte*>(view.buf), *dtype, 1, !view.readonly);
    for (int i = view.ndim - 1; i >= 0; --i) layout.axes.push_back({view.shape[i], view.strides[i]});
    span = dense_span(layout);
  }
  PyBuffer_Release(&view);
  return span;
}

std::optional<Dtype> dtype_of(const dlpack::DataType& type) {
  if (type.lanes != 1) return std::nullopt;
  if (type.code == dlpack::kFloat && type.bits == 32) return Dtype::float32;
  if (type.code == dlpack::kFloat && type.bits == 64) return Dtype::float64;
  if (type.code == dlpack::kFloat && type.bits == 16) return Dtype::float16;
  if (type.code == dlpack::kBfloat && type.bits == 16) return Dtype::bfloat16;
  if (type.code == dlpack::kComplex && type.bits == 64) return Dtype::complex64;
  if (type.code == dlpack::kComplex && type.bits == 128) return Dtype::complex128;
  return std::nullopt;
}

std::optional<Span> span_of_tensor(PyObject* tensor, Layout& layout, dlpack::FromPyObject from_py_object,
                                   dlpack::Device device = {dlpack::kCpu, 0}) {
  dlpack::Tensor view;
  if (from_py_object(tensor, &view) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  const auto dtype = dtype_of(view.dtype);
  if (view.device.type != device.type || view.device.id != device.id || !dtype) return std::nullopt;
  const int64_t item = kItemSizes[static_cast<std::size_t>(*dtype)];
  layout.start(static_cast<std::byte*>(view.data) + view.byte_offset, *dtype, item, true);
  int64_t contiguous = 1;
  for (int i = view.ndim - 1; i >= 0; --i) {
    // DLPack may omit the strides of a contiguous array.
    layout.axes.push_back({view.shape[i], view.strides ? view.strides[i] : contiguous});
    contiguous *= view.shape[i];
  }
  return dense_span(layout);
}

constexpr Dtype kKindsOnDevices[] = {Dtype::float32, Dtype::bfloat16, Dtype::float16};

template <class SpanOf>
Described describe(const nb::list& arrays, const SpanOf& span_of) {
  Described described;
  Layout layout = {};
  int64_t index = 0;
  for (nb::handle array : arrays) {
    if (const auto span = span_of(array.ptr(), layout)) {
      described.arrays.add(span->data, span->count, span->dtype);
      described.in_order &= layout.in_order;
      described.writable &= layout.writable;
    } else {
      described.left_out.push_back(index);
    }
    ++index;
  }
  return described;
}

}  // namespace

Described describe_buffers(nb::list arrays) { return describe(arrays, span_of_buffer); }

Described describe_tensors(nb::list tensors, nb::object exchange_api) {
  const dlpack::FromPyObject from_py_object = dlpack::from_py_object(exchange_api.ptr());
  return describe(tensors, [from_py_object](PyObject* tensor, Layout& layout) {
    return span_of_tensor(tensor, layout, from_py_object);
  });
}

std::optional<OnDevice> describe_on_device(nb::list tensors, nb::object exchange_api, int device_type, int device_id) {
  const dlpack::FromPyObject from_py_object = dlpack::from_py_object(exchange_api.ptr());
  const dlpack::Device device = {device_type, device_id};
  OnDevice found;
  Arrays arrays;
  Layout layout = {};
  for (nb::handle tensor : tensors) {
    const auto span = span_of_tensor(tensor.ptr(), layout, from_py_object, device);
    if (!span) return std::nullopt;
    const auto kind = std::find(std::begin(kKindsOnDevices), std::end(kKindsOnDevices), span->dtype);
    if (kind == std::end(kKindsOnDevices)) return std::nullopt;
    found.addresses.push_back(reinterpret_cast<std::uintptr_t>(span->data));
    found.counts.push_back(span->count);
    found.kinds.push_back(static_cast<int>(kind - std::begin(kKindsOnDevices)));
    arrays.add(span->data, span->count, span->dtype);
  }
  found.apart = !arrays.overlap({});
  return found;
}

// The part of DLPack 1.3's binary interface that describes where a tensor is in memory.
#pragma once

#include <cstdint>
#include <stdexcept>

#include <Python.h>

namespace dlpack {

constexpr int32_t kCpu = 1;
constexpr uint8_t kFloat = 2, kBfloat = 4, kComplex = 5;
constexpr uint32_t kMajorVersion = 1;

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

using FromPyObject = int (*)(void* object, Tensor* out);

// Unused functions are declared as plain pointers, as placeholders.
struct ExchangeApi {
  uint32_t major_version;
  uint32_t minor_version;
  ExchangeApi* older;
  void* allocate;
  void* managed_from_py_object;
  void* managed_to_py_object;
  FromPyObject from_py_object;
  void* current_work_stream;
};

// Returns the function that describes a tensor without owning it. Throws if the capsule has no compatible table.
inline FromPyObject from_py_object(PyObject* capsule) {
  auto* api = static_cast<ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  PyErr_Clear();  // the exception below says more
  // Other major versions have other layouts. A newer table links to older ones.
  while (api && api->major_version > kMajorVersion) api = api->older;
  if (!api || api->major_version != kMajorVersion || !api->from_py_object) {
    throw std::invalid_argument("the tensors' DLPack exchange table has no function for describing a tensor");
  }
  return api->from_py_object;
}

}  // namespace dlpack

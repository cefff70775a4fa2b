// Find the memory of Python's arrays: of tensors by DLPack's exchange table, of anything else by the buffer protocol.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <nanobind/nanobind.h>

#include "arrays.hpp"

// The arrays that fill a contiguous stretch of memory, and the indices of those left out: not dense, not aligned, of an
// unsupported dtype or device, or without memory.
struct Described {
  Arrays arrays;
  std::vector<int64_t> left_out;
  bool in_order = true;  // whether all arrays are in C order
  bool writable = true;
};

// Unsigned 16-bit integers are taken as bfloat16, which the buffer protocol does not support.
Described describe_buffers(nanobind::list arrays);

// `exchange_api`: the capsule in the attribute `__dlpack_c_exchange_api__` of the tensors' type.
Described describe_tensors(nanobind::list tensors, nanobind::object exchange_api);

// Tensors of one device that can be read there: of float32 (kind 0), bfloat16 (1) or float16 (2), each in a contiguous
// stretch of memory.
struct OnDevice {
  std::vector<std::uintptr_t> addresses;
  std::vector<int64_t> counts;
  std::vector<int> kinds;
  bool apart;  // whether no two share memory
};

// The device is DLPack's. Empty if one of the tensors is not as above.
std::optional<OnDevice> describe_on_device(nanobind::list tensors, nanobind::object exchange_api, int device_type,
                                           int device_id);

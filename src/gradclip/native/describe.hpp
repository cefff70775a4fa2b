// Find the memory of Python's arrays: of tensors by DLPack's exchange table, of anything else by the buffer protocol.
#pragma once

#include <cstdint>
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

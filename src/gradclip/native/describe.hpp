// Where Python's arrays lie: tensors by DLPack's exchange table, anything else by its buffer.
#pragma once

#include <cstdint>
#include <vector>

#include <nanobind/nanobind.h>

#include "arrays.hpp"

// The arrays that can be read and written as a run of memory, and the indices of those that cannot: not dense, not
// aligned, of another dtype or device, or without memory.
struct Described {
  Arrays arrays;
  std::vector<int64_t> left_out;
  bool in_order = true;  // whether all arrays lie in the order of their indices, the last one first
  bool writable = true;
};

// Unsigned 16-bit integers stand for bfloat16, which the buffer protocol does not know.
Described describe_buffers(nanobind::list arrays);

// `exchange_api`: the capsule in the attribute `__dlpack_c_exchange_api__` of the tensors' type.
Described describe_tensors(nanobind::list tensors, nanobind::object exchange_api);

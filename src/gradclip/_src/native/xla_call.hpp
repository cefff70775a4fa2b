// Read a call by XLA, and run what it asks for.
#pragma once

#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "kernels.hpp"
#include "xla_ffi.hpp"

namespace xla_ffi {

Dtype dtype_of(DataType type);

template <class Value>
Value attribute(const Attributes& attributes, std::string_view name, DataType dtype) {
  for (int64_t i = 0; i < attributes.count; ++i) {
    if (attributes.names[i]->view() != name || attributes.types[i] != kScalarAttribute) continue;
    const auto* scalar = static_cast<const Scalar*>(attributes.values[i]);
    if (scalar->dtype != dtype) break;
    Value value;
    std::memcpy(&value, scalar->value, sizeof value);
    return value;
  }
  throw std::invalid_argument("the attribute " + std::string(name) + " is missing or has the wrong type");
}

double real_attribute(const Call& call, std::string_view name);
int threads_of(const Call& call);

int64_t product(std::span<const int64_t> lengths);
std::span<const int64_t> dims_of(const Buffer& buffer);
std::span<double> numbers_of(const Buffer& buffer);

// Runs a function, and returns its exception as an error of XLA. No exception may escape, because the caller uses a C
// interface. XLA's threads may flush subnormals, which must not happen here.
Error* run(Call* call, void (*function)(const Call&)) noexcept;

}  // namespace xla_ffi

#include "xla_call.hpp"

#include <exception>

#include "parallel.hpp"

namespace xla_ffi {

namespace {

// Answers the metadata request at registration, if this is one. XLA refuses functions of other versions.
bool described(const Call& call) {
  for (Extension* extension = call.head.extensions; extension; extension = extension->next) {
    if (extension->type != kMetadataExtension) continue;
    Metadata& metadata = *reinterpret_cast<MetadataExtension*>(extension)->metadata;
    metadata.version.major = kMajorVersion;
    metadata.version.minor = kMinorVersion;
    metadata.traits = 0;
    return true;
  }
  return false;
}

Error* error(const Call& call, const char* message, int code) {
  ErrorRequest request = {{sizeof(ErrorRequest), nullptr}, message, code};
  return call.api->create_error(&request);
}

}  // namespace

Dtype dtype_of(DataType type) {
  switch (type) {
    case kFloat16: return Dtype::float16;
    case kFloat32: return Dtype::float32;
    case kFloat64: return Dtype::float64;
    case kBfloat16: return Dtype::bfloat16;
    case kComplex64: return Dtype::complex64;
    case kComplex128: return Dtype::complex128;
    default: throw std::invalid_argument("the kernels do not support arrays of XLA's type " + std::to_string(type));
  }
}

double real_attribute(const Call& call, std::string_view name) {
  return attribute<double>(call.attributes, name, kFloat64);
}

int threads_of(const Call& call) {
  return static_cast<int>(attribute<int64_t>(call.attributes, "threads", kInt64));
}

int64_t product(std::span<const int64_t> lengths) {
  int64_t count = 1;
  for (const int64_t length : lengths) count *= length;
  return count;
}

std::span<const int64_t> dims_of(const Buffer& buffer) {
  return {buffer.dims, static_cast<std::size_t>(buffer.rank)};
}

std::span<double> numbers_of(const Buffer& buffer) {
  if (buffer.dtype != kFloat64) throw std::invalid_argument("numbers must be float64");
  return {static_cast<double*>(buffer.data), static_cast<std::size_t>(product(dims_of(buffer)))};
}

Error* run(Call* call, void (*function)(const Call&)) noexcept {
  try {
    const ReadyToThrow ready;
    const DefaultArithmetic scope;
    if (!described(*call) && call->stage == kExecute) function(*call);
    return nullptr;
  } catch (const std::invalid_argument& wrong) {
    return error(*call, wrong.what(), kInvalidArgument);
  } catch (const std::exception& failed) {
    return error(*call, failed.what(), kInternal);
  }
}

}  // namespace xla_ffi

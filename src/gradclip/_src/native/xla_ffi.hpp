// The part of XLA's foreign function interface (binary, version 0.2) that a CPU function needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace xla_ffi {

constexpr int kMajorVersion = 0, kMinorVersion = 2;

// Values of the enumeration fields below, each stored as an int.
enum DataType : int { kBool = 1, kInt64 = 5, kFloat16 = 10, kFloat32 = 11, kFloat64 = 12, kComplex64 = 15, kBfloat16 = 16, kComplex128 = 18 };
constexpr int kMetadataExtension = 1;
constexpr int kScalarAttribute = 3;
constexpr int kExecute = 3;
constexpr int kInvalidArgument = 3, kInternal = 13;

// Each structure starts with its size, as the side that fills it knows it, and a list of extensions.
struct Extension {
  std::size_t size;
  int type;
  Extension* next;
};

struct Head {
  std::size_t size;
  Extension* extensions;
};

struct Version {
  Head head;
  int major;
  int minor;
};

struct Error;  // defined by XLA

struct ErrorRequest {
  Head head;
  const char* message;
  int code;
};

struct Api {
  Head head;
  Version version;
  const void* internal;
  Error* (*create_error)(ErrorRequest* request);
  // More functions follow, none of them needed here.
};

// What XLA asks a function at registration.
struct Metadata {
  std::size_t size;
  Version version;
  uint32_t traits;
  // Fields for functions with state follow.
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

struct Buffer {
  Head head;
  DataType dtype;
  void* data;
  int64_t rank;
  int64_t* dims;
};

// Arguments or results. On the CPU, all of them are buffers.
struct Buffers {
  Head head;
  int64_t count;
  int* types;
  Buffer** buffers;
};

struct Text {
  const char* start;
  std::size_t length;

  std::string_view view() const { return {start, length}; }
};

struct Scalar {
  DataType dtype;
  void* value;
};

struct Attributes {
  Head head;
  int64_t count;
  int* types;
  Text** names;
  void** values;
};

struct Call {
  Head head;
  const Api* api;
  void* context;
  int stage;
  Buffers arguments;
  Buffers results;
  Attributes attributes;
  // A field for asynchronous functions follows.
};

using Function = Error*(Call* call);

}  // namespace xla_ffi

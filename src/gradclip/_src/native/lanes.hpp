// 16 elements at a time, in vectors as wide as the processor's registers. Everything here has internal linkage: each
// variant of the kernels compiles its own copy, with its own instructions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace {

#if defined(__AVX2__)
constexpr int kBytes = 32;
#else
constexpr int kBytes = 16;
#endif

template <class Number, int bytes = kBytes>
using Vector __attribute__((vector_size(bytes))) = Number;
using Halves = Vector<uint16_t, kBytes / 2>;

// Compilers turn each of these into one instruction, for memory of any alignment. A vector type with lower alignment
// would not work: Clang drops the alignment of a vector type declared by a template.
template <class Loaded>
inline Loaded load_from(const void* memory) {
  Loaded x;
  __builtin_memcpy(&x, memory, sizeof x);
  return x;
}
template <class Loaded>
inline void store_to(void* memory, Loaded x) {
  __builtin_memcpy(memory, &x, sizeof x);
}

constexpr int64_t kCacheLine = 64;

// Processors fetch by themselves what is read in order. But where elements are converted, many instructions wait, and
// loads begin late. So these are fetched a quarter of a page ahead. Where elements need no conversion, that takes longer.
constexpr int64_t kAhead = 1024;

// Fetches the bytes of `count` elements some bytes after `x`. Beyond the end of an array this has no effect.
template <class Raw>
inline void fetch_ahead(const Raw* x, int64_t count) {
  const auto* bytes = reinterpret_cast<const std::byte*>(x) + kAhead;
  for (int64_t i = 0; i < count * static_cast<int64_t>(sizeof(Raw)); i += kCacheLine) __builtin_prefetch(bytes + i);
}

// The same for every vector width, so that every variant adds in the same order.
constexpr int kLanes = 16;

// 16 numbers in vectors.
template <class Number>
struct Lanes {
  static constexpr int kSize = kBytes / sizeof(Number);
  static constexpr int kVectors = kLanes / kSize;
  Vector<Number> v[kVectors];

  static Lanes filled(Number x) {
    Lanes lanes;
    for (auto& vector : lanes.v) vector = Vector<Number>{} + x;
    return lanes;
  }
  static Lanes load(const Number* x) {
    Lanes lanes;
    for (int i = 0; i < kVectors; ++i) lanes.v[i] = load_from<Vector<Number>>(x + i * kSize);
    return lanes;
  }
  void store(Number* x) const {
    for (int i = 0; i < kVectors; ++i) store_to(x + i * kSize, v[i]);
  }
  Lanes& operator+=(const Lanes& other) {
    for (int i = 0; i < kVectors; ++i) v[i] += other.v[i];
    return *this;
  }
};

}  // namespace

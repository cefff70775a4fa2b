// A CRC-32 is the remainder of a polynomial whose coefficients are the bits of the message, modulo
// x**32 + x**26 + ... + 1. Bits are in reflected order: the lowest bit has the highest power.
//
// A block of 128 bits that is followed by n more bits adds block * x**n. So a block moves n bits on when it is multiplied
// by the remainder of x**n, and is added to what is there. Four blocks at a time, or four pairs of them, move past the next
// ones; at the end they are one block, whose checksum is that of all the bytes that went into it (Gopal and others, "Fast
// CRC computation for generic polynomials using PCLMULQDQ instruction", 2009).
#include "crc32.hpp"

#include <array>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr uint32_t kPolynomial = 0xedb88320;

constexpr uint32_t times_x(uint32_t remainder) { return (remainder >> 1) ^ (remainder & 1 ? kPolynomial : 0); }

constexpr std::array<uint32_t, 256> kOfByte = [] {
  std::array<uint32_t, 256> table = {};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t found = byte;
    for (int bit = 0; bit < 8; ++bit) found = times_x(found);
    table[byte] = found;
  }
  return table;
}();

uint32_t byte_by_byte(const std::byte* bytes, std::size_t count, uint32_t state) {
  for (std::size_t i = 0; i < count; ++i) {
    state = (state >> 8) ^ kOfByte[(state ^ static_cast<uint32_t>(bytes[i])) & 0xff];
  }
  return state;
}

// The remainder of x**n, as the factor of one half of a block. A product of two reflected polynomials lies one bit too
// low, which the factor makes up for.
constexpr int64_t remainder_of_power(int n) {
  uint32_t found = 0x80000000;  // x**0
  for (int i = 0; i < n; ++i) found = times_x(found);
  return static_cast<int64_t>(found) << 1;
}

uint32_t product(uint32_t x, uint32_t y) {
  uint32_t found = 0;
  for (; x; x <<= 1, y = times_x(y)) found ^= x >> 31 ? y : 0;  // the highest bit has power 0
  return found;
}

constexpr std::size_t kBlock = 16, kPair = 32, kAtOnce = 4;

}  // namespace

#if defined(__x86_64__)

bool multiplies_polynomials() { return __builtin_cpu_supports("pclmul"); }

#define GRADCLIP_MULTIPLIES __attribute__((target("pclmul,sse2")))
#define GRADCLIP_MULTIPLIES_PAIRS __attribute__((target("vpclmulqdq,pclmul,avx2")))

namespace {

bool multiplies_pairs() {
  static const bool found = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");
  return found;
}

// The factors that move a block past `bits` more. The lower half of a block has the higher powers.
template <int bits>
GRADCLIP_MULTIPLIES inline __m128i moved(__m128i block) {
  const __m128i factors = _mm_set_epi64x(remainder_of_power(bits - 32), remainder_of_power(bits + 32));
  return _mm_xor_si128(_mm_clmulepi64_si128(block, factors, 0x00), _mm_clmulepi64_si128(block, factors, 0x11));
}

template <int bits>
GRADCLIP_MULTIPLIES_PAIRS inline __m256i moved(__m256i pair) {
  constexpr int64_t low = remainder_of_power(bits + 32), high = remainder_of_power(bits - 32);
  const __m256i factors = _mm256_set_epi64x(high, low, high, low);
  return _mm256_xor_si256(_mm256_clmulepi64_epi128(pair, factors, 0x00), _mm256_clmulepi64_epi128(pair, factors, 0x11));
}

inline __m128i block_at(const std::byte* bytes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)); }

GRADCLIP_MULTIPLIES_PAIRS inline __m256i pair_at(const std::byte* bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
}

// What is left to do: bytes, and the state before them.
struct Rest {
  const std::byte* bytes;
  std::size_t count;
  uint32_t state;
};

uint32_t state_after(__m128i block) {
  std::byte bytes[kBlock];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), block);
  return byte_by_byte(bytes, kBlock, 0);
}

GRADCLIP_MULTIPLIES Rest by_blocks(Rest rest) {
  constexpr std::size_t kStep = kAtOnce * kBlock;
  if (rest.count < kStep) return rest;
  __m128i blocks[kAtOnce];
  for (std::size_t i = 0; i < kAtOnce; ++i) blocks[i] = block_at(rest.bytes + i * kBlock);
  blocks[0] = _mm_xor_si128(blocks[0], _mm_cvtsi32_si128(static_cast<int>(rest.state)));
  for (rest.bytes += kStep, rest.count -= kStep; rest.count >= kStep; rest.bytes += kStep, rest.count -= kStep) {
    for (std::size_t i = 0; i < kAtOnce; ++i) {
      blocks[i] = _mm_xor_si128(moved<8 * kStep>(blocks[i]), block_at(rest.bytes + i * kBlock));
    }
  }
  for (std::size_t i = 1; i < kAtOnce; ++i) blocks[i] = _mm_xor_si128(moved<8 * kBlock>(blocks[i - 1]), blocks[i]);
  return {rest.bytes, rest.count, state_after(blocks[kAtOnce - 1])};
}

GRADCLIP_MULTIPLIES_PAIRS Rest by_pairs(Rest rest) {
  constexpr std::size_t kStep = kAtOnce * kPair;
  if (rest.count < kStep) return rest;
  __m256i pairs[kAtOnce];
  for (std::size_t i = 0; i < kAtOnce; ++i) pairs[i] = pair_at(rest.bytes + i * kPair);
  pairs[0] = _mm256_xor_si256(pairs[0], _mm256_set_epi32(0, 0, 0, 0, 0, 0, 0, static_cast<int>(rest.state)));
  for (rest.bytes += kStep, rest.count -= kStep; rest.count >= kStep; rest.bytes += kStep, rest.count -= kStep) {
    for (std::size_t i = 0; i < kAtOnce; ++i) {
      pairs[i] = _mm256_xor_si256(moved<8 * kStep>(pairs[i]), pair_at(rest.bytes + i * kPair));
    }
  }
  for (std::size_t i = 1; i < kAtOnce; ++i) pairs[i] = _mm256_xor_si256(moved<8 * kPair>(pairs[i - 1]), pairs[i]);
  const __m128i first = _mm256_castsi256_si128(pairs[kAtOnce - 1]), second = _mm256_extracti128_si256(pairs[kAtOnce - 1], 1);
  return {rest.bytes, rest.count, state_after(_mm_xor_si128(moved<8 * kBlock>(first), second))};
}

}  // namespace

uint32_t crc32(const std::byte* bytes, std::size_t count, uint32_t before) {
  Rest rest = {bytes, count, ~before};
  if (multiplies_pairs()) rest = by_pairs(rest);
  rest = by_blocks(rest);
  return ~byte_by_byte(rest.bytes, rest.count, rest.state);
}

#else

bool multiplies_polynomials() { return false; }

uint32_t crc32(const std::byte* bytes, std::size_t count, uint32_t before) {
  return ~byte_by_byte(bytes, count, ~before);
}

#endif

uint32_t crc32_joined(uint32_t first, uint32_t second, int64_t size) {
  uint32_t power = 0x00800000;  // x**8: a byte
  for (; size > 0; size /= 2, power = product(power, power)) {
    if (size % 2) first = product(power, first);
  }
  return first ^ second;
}

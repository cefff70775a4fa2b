// The checksum of zip archives.
#pragma once

#include <cstddef>
#include <cstdint>

// Whether this processor can multiply polynomials. Without that, zlib is as fast as what could be written here.
bool multiplies_polynomials();

// The CRC-32 of bytes, given that of the bytes before them (0 if there are none): what zlib.crc32 returns. Only where
// `multiplies_polynomials`.
uint32_t crc32(const std::byte* bytes, std::size_t count, uint32_t before);

// The CRC-32 of bytes and `size` more bytes behind them, given that of each.
uint32_t crc32_joined(uint32_t first, uint32_t second, int64_t size);

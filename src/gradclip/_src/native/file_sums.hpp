// Sums of numbers that lie in a file: read piece by piece, into memory that stays in the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.hpp"

// Whether files can be read here.
bool reads_files();

// Where numbers lie in an open file.
struct Place {
  int file;
  int64_t offset;
};

// Memory to read into. Its size bounds how many threads read.
struct Room {
  std::byte* data;
  int64_t size;
};

struct FileSums {
  std::vector<double> sums;
  uint32_t checksum = 0;
  int error = 0;  // of the system; 0 if there was none
  bool ended = false;  // whether the file ended before
};

// What to add up of `count` numbers: one sum for every `piece` of them, bit-identical to `Arrays::sum` of that piece.
struct Asked {
  int64_t count;
  Dtype dtype;
  double p;
  bool in_float;
  int64_t piece;
};

// With `checks`, the CRC-32 of all bytes too. Only where the processor `multiplies_polynomials`.
FileSums file_sums(Place from, const Asked& asked, Room room, bool checks, int threads);

// The sums of the numbers in one place minus those in another, of the same dtype, in double.
FileSums difference_sums(Place from, Place other, const Asked& asked, Room room, int threads);

// How often each byte occurs. `sums` has 256 counts.
FileSums byte_counts(Place from, int64_t count, Room room, bool checks);

// Discrete Gaussian noise on integers, by attempts whose random bits are given.
#pragma once

#include "arrays.hpp"

// Goes on adding noise to `values` after `from`, and writes to `sums`: arrays of int64, described as doubles. The first
// half of `words` has each attempt's first word, the second half its second. On one thread.
NoiseProgress add_noise(const NoiseTarget& target, const Arrays& words, const Arrays& values, const Arrays& sums,
                        NoiseProgress from);

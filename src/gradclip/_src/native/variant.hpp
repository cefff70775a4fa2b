// One variant of the kernels, included by one source file for each instruction set.
#pragma once

#include "exact.hpp"
#include "packing.hpp"
#include "products.hpp"
#include "reductions.hpp"
#include "results.hpp"
#include "sampler.hpp"
#include "weighted.hpp"

namespace {

template <class Format>
constexpr Kernels real_kernels() {
  return {sum_kernel<Real<Format>>, extremes_kernel<Format>, exact_kernel<Format>,    scale_kernel<Format>,
          subtract_kernel<Format>,  clamp_kernel<Format>,    add_rows_kernel<Format>, pack_kernel<Format>,
          pack_across_kernel<Format>, multiply_kernel,       dot_kernel,              noise_kernel,
          kFuses};
}

// Only the kernels that need magnitudes. Sums of order 2, exact sums, scaling and weighted sums treat a complex array
// as a real one with twice as many elements.
template <class Format>
constexpr Kernels pair_kernels() {
  Kernels kernels = {};
  kernels.sum = sum_kernel<Pairs<Format>>;
  kernels.extremes = pair_extremes_kernel<Format>;
  return kernels;
}

constexpr KernelTable kVariant = {real_kernels<Float32>(),  real_kernels<Float64>(), real_kernels<Float16>(),
                                  real_kernels<BFloat16>(), pair_kernels<Float32>(), pair_kernels<Float64>()};

}  // namespace

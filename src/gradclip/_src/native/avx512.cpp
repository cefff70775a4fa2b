// Kernels that compute more than they read, compiled for AVX-512.
#include "products.hpp"
#include "sampler.hpp"

const decltype(Kernels::multiply) kAvx512Multiply = multiply_kernel;
const decltype(Kernels::noise) kAvx512Noise = noise_kernel;

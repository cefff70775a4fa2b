// Products of matrices compiled for AVX-512.
#include "products.hpp"

const decltype(Kernels::multiply) kAvx512Multiply = multiply_kernel;

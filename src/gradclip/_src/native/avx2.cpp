// The kernels compiled for AVX2 and F16C.
#include "variant.hpp"

const KernelTable kAvx2Kernels = kVariant;

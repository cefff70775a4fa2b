// The kernels with AVX2 and F16C.
#include "variants.hpp"

const char* avx2_name() { return "avx2"; }

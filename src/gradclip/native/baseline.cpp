// The kernels in the instructions that every processor has.
#include "variants.hpp"

const char* baseline_name() { return "baseline"; }

// The kernels in the instructions that every processor has.
#include "variant.hpp"

const KernelTable kBaselineKernels = kVariant;

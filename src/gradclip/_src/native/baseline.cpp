// The kernels compiled for the instructions that every processor has.
#include "variant.hpp"

const KernelTable kBaselineKernels = kVariant;

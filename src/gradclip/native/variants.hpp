// The sets of instructions that there are kernels for.
#pragma once

const char* baseline_name();
const char* avx2_name();

// The kernels as Python sees them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "variants.hpp"

namespace {

std::vector<std::string> variants() {
  std::vector<std::string> names = {baseline_name()};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) names.push_back(avx2_name());
#endif
  return names;
}

}  // namespace

NB_MODULE(_kernels, m) { m.def("variants", &variants); }

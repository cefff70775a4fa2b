#include "settle.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace {

// Steps 2 to 4 of the proof in core/coefficient.py, for factors that need no second one.
constexpr double kLowered = 1.0 - 16.0 * 0x1p-53, kNarrowLowered = 1.0 - 0x1p-23;
constexpr double kLeast = 0x1p-126, kBeyond = 0x1p127;  // a norm must fit a float32 scalar

double* numbers_of(const Arrays& memory, std::size_t count) {
  const Span& span = memory.spans().at(0);
  if (span.dtype != Dtype::float64 || span.count != static_cast<int64_t>(count)) {
    throw std::invalid_argument("there must be memory for " + std::to_string(count) + " float64 numbers");
  }
  return reinterpret_cast<double*>(span.data);
}

// Replaces sums by norms. `error_of` returns the error of a norm. `lost` says whether a sum of 0 lost something.
template <class ErrorOf, class Lost>
Settled settled(std::size_t count, const Question& asked, const ErrorOf& error_of, Lost lost) {
  const bool one_limit = asked.limits.count() == 1;
  const double* limits = numbers_of(asked.limits, one_limit ? 1 : count);
  double *norms = numbers_of(asked.norms, count), *table = numbers_of(asked.table, 5 * count);
  bool all = true;
  for (std::size_t i = 0; i < count; ++i) {
    const double sum = norms[i], norm = asked.p == 2.0 ? std::sqrt(sum) : sum;
    if (!(sum > asked.enough || (sum == 0.0 && !lost(i))) || !(norm < kBeyond)) return Settled::open;
    norms[i] = norm;
    const double limit = limits[one_limit ? 0 : i], error = error_of(i);
    const double upper = norm * (1.0 / (1.0 - error));
    const bool keep = upper <= limit;
    const double wide = keep ? 1.0 : limit / upper * kLowered, narrow = keep ? 1.0 : wide * kNarrowLowered;
    // A negative or NaN threshold fails the first comparison.
    if (!keep && (!(narrow >= kLeast) || norm * (1.0 - 2.0 * error) <= limit)) return Settled::open;
    const double line[] = {keep ? 1.0 : 0.0, wide, 1.0, narrow, 1.0};
    for (std::size_t k = 0; k < std::size(line); ++k) table[k * count + i] = line[k];
    all = all && keep;
  }
  return all ? Settled::kept : Settled::scaled;
}

// Says which sums of squares that are 0 lost something: those of magnitudes are not 0. They are added up when asked for.
template <class Magnitudes>
auto lost_by(const Magnitudes& magnitudes) {
  return [&magnitudes, found = std::vector<double>()](std::size_t i) mutable {
    if (found.empty()) found = magnitudes();
    return found[i] != 0.0;
  };
}

}  // namespace

Settled settle_groups(const Arrays& arrays, const std::vector<std::size_t>& group_of, const Question& asked,
                      bool in_float, int threads) {
  const std::size_t groups = asked.errors.size();
  const auto sums = [&](double p) {
    std::vector<double> values;
    for (const Sum& sum : arrays.group_sums(group_of, groups, p, in_float, threads)) values.push_back(sum.value);
    return values;
  };
  const auto magnitudes = [&] { return sums(1.0); };
  const std::vector<double> found = sums(asked.p);
  std::copy(found.begin(), found.end(), numbers_of(asked.norms, groups));
  return settled(groups, asked, [&](std::size_t i) { return asked.errors[i]; }, lost_by(magnitudes));
}

Settled settle_rows(const Arrays& arrays, const RowCounts& counts, const Question& asked, int threads) {
  std::vector<double> error_of;
  for (std::size_t i = 0; i < counts.size(); ++i) error_of.insert(error_of.end(), counts[i], asked.errors.at(i));
  const auto magnitudes = [&] {
    std::vector<double> values(error_of.size());
    sum_rows(arrays, counts, 1.0, values.data(), threads);
    return values;
  };
  sum_rows(arrays, counts, asked.p, numbers_of(asked.norms, error_of.size()), threads);
  return settled(error_of.size(), asked, [&](std::size_t i) { return error_of[i]; }, lost_by(magnitudes));
}

#include "arrays.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace {

#if defined(__x86_64__)
// Clang before 19 does not support "f16c" in __builtin_cpu_supports. The AVX2 check also covers that the operating
// system saves the registers.
bool has_avx2_variant() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  const bool half_conversions = __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
  return half_conversions && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx512_variant() { return has_avx2_variant() && __builtin_cpu_supports("avx512f"); }

const KernelTable* avx512_table() {
  static const KernelTable table = [] {
    KernelTable kernels = kAvx2Kernels;
    for (Kernels& of_dtype : kernels) {
      of_dtype.multiply = kAvx512Multiply;
      of_dtype.noise = kAvx512Noise;
    }
    return kernels;
  }();
  return &table;
}
#endif

const KernelTable* table_of(const std::string& variant) {
#if defined(__x86_64__)
  if (variant == "avx2" && has_avx2_variant()) return &kAvx2Kernels;
  if (variant == "avx512" && has_avx512_variant()) return avx512_table();
#endif
  return variant == "baseline" ? &kBaselineKernels : nullptr;
}

// Atomic, because other threads may be inside a call (without Python's lock) while one picks a variant.
std::atomic<const KernelTable*> table_in_use{table_of(variants().back())};

std::byte* start_of(const Span& span, const Piece& piece) {
  return span.data + piece.offset * item_size(span.dtype);
}

bool any_of_dtype(const std::vector<Span>& spans, bool (*has)(Dtype)) {
  return std::any_of(spans.begin(), spans.end(), [has](const Span& span) { return has(span.dtype); });
}

// The elements worth a thread that are read, or scaled.
int64_t read_by_one(const std::vector<Span>& spans) {
  const bool wide = any_of_dtype(spans, [](Dtype dtype) { return dtype == Dtype::float64; });
  return wide ? kReadByOne / 2 : kReadByOne;
}

// The same for magnitudes. Those of complex numbers are computed.
int64_t measured_by_one(const std::vector<Span>& spans) {
  return any_of_dtype(spans, is_complex) ? kComputedByOne : read_by_one(spans);
}

}  // namespace

const Kernels& kernels_of(Dtype dtype) { return (*table_in_use.load())[static_cast<std::size_t>(dtype)]; }

std::vector<Span> as_real(std::vector<Span> spans) {
  for (Span& span : spans) {
    if (!is_complex(span.dtype)) continue;
    span.dtype = span.dtype == Dtype::complex64 ? Dtype::float32 : Dtype::float64;
    span.count *= 2;
  }
  return spans;
}

std::vector<std::string> variants() {
  std::vector<std::string> names = {"baseline"};
  for (const char* name : {"avx2", "avx512"}) {
    if (table_of(name)) names.emplace_back(name);
  }
  return names;
}

void use_variant(const std::string& name) {
  const KernelTable* table = table_of(name);
  if (!table) throw std::invalid_argument("this processor cannot run the kernel variant '" + name + "'");
  table_in_use = table;
}

void Arrays::add(void* data, int64_t count, Dtype dtype) {
  spans_.push_back({static_cast<std::byte*>(data), count, dtype});
}

int64_t Arrays::count() const {
  int64_t elements = 0;
  for (const Span& span : spans_) elements += span.count;
  return elements;
}

std::vector<int64_t> Arrays::counts() const {
  std::vector<int64_t> counts;
  for (const Span& span : spans_) counts.push_back(span.count);
  return counts;
}

bool Arrays::only_halves() const {
  return std::all_of(spans_.begin(), spans_.end(), [](const Span& span) { return item_size(span.dtype) == 2; });
}

std::vector<std::string> Arrays::dtypes() const {
  std::array<bool, kDtypes> present = {};
  for (const Span& span : spans_) present[static_cast<std::size_t>(span.dtype)] = true;
  std::vector<std::string> names;
  for (std::size_t i = 0; i < present.size(); ++i) {
    if (present[i]) names.emplace_back(kDtypeNames[i]);
  }
  return names;
}

bool Arrays::overlap(std::vector<Stretch> others) const {
  std::vector<Stretch> stretches = std::move(others);
  stretches.reserve(stretches.size() + spans_.size());
  for (const Span& span : spans_) {
    const auto begin = reinterpret_cast<std::uintptr_t>(span.data);
    // An array without elements has no address.
    if (span.count) stretches.emplace_back(begin, begin + static_cast<std::uintptr_t>(span.count * item_size(span.dtype)));
  }
  // After sorting by start address, if any two overlap, two neighbours do.
  std::sort(stretches.begin(), stretches.end());
  const auto meet = [](const Stretch& first, const Stretch& second) { return first.second > second.first; };
  return std::adjacent_find(stretches.begin(), stretches.end(), meet) != stretches.end();
}

Sum Arrays::sum(double p, double divisor, bool in_float, int threads) const {
  return row_sums(1, p, {divisor}, in_float, threads)[0];
}

Extremes Arrays::extremes(int threads) const { return row_extremes(1, threads)[0]; }

ExactSum Arrays::exact_sum(int p, int threads) const {
  if (p != 1 && p != 2) throw std::invalid_argument("exact sums must be of order 1 or 2, got " + std::to_string(p));
  const std::vector<Span> spans = as_real(spans_);
  const std::vector<Piece> pieces = cut(spans);
  // Exact sums do not depend on the order, so parts are added as soon as they are ready.
  ExactSum whole;
  std::mutex writing;
  const int useful = threads_worth(pieces, threads, kComputedByOne);
  share_out(pieces, useful, Order::backward, [&](std::size_t i) {
    const Span& span = spans[pieces[i].array];
    ExactSum part;
    kernels_of(span.dtype).add_exactly(start_of(span, pieces[i]), pieces[i].count, p, part);
    const std::lock_guard lock(writing);
    whole.add(part);
  });
  return whole;
}

namespace {

// Checked before any thread starts.
void check_groups(const std::vector<std::size_t>& group_of, std::size_t arrays, std::size_t groups) {
  const auto known = [groups](std::size_t group) { return group < groups; };
  if (group_of.size() != arrays || !std::all_of(group_of.begin(), group_of.end(), known)) {
    throw std::invalid_argument("each array must have a group below " + std::to_string(groups));
  }
}

}  // namespace

template <class GroupOf>
std::vector<Sum> Arrays::grouped_sums(const GroupOf& group_of, std::size_t groups, double p,
                                      const std::vector<double>& divisors, bool in_float, int threads,
                                      SumInOrder* whole) const {
  const std::vector<Span> spans = p == 2.0 ? as_real(spans_) : spans_;
  const std::vector<Piece> pieces = cut(spans);
  // Stored by index and added in order below, so that the result does not depend on thread timing.
  std::vector<Sum> sums(pieces.size(), Sum{0.0, 0});
  const int useful = threads_worth(pieces, threads, p == 1.0 || p == 2.0 ? measured_by_one(spans) : kComputedByOne);
  share_out(pieces, useful, Order::forward, [&](std::size_t i) {
    const Span& span = spans[pieces[i].array];
    const double divisor = divisors[group_of(pieces[i].array)];
    if (divisor == 0.0) return;
    sums[i] = kernels_of(span.dtype).sum(start_of(span, pieces[i]), pieces[i].count, p, divisor, in_float);
  });
  std::vector<SumInOrder> of_groups(groups);
  for (std::size_t i = 0; i < pieces.size(); ++i) of_groups[group_of(pieces[i].array)].add(sums[i]);
  if (whole) std::for_each(sums.begin(), sums.end(), [whole](const Sum& part) { whole->add(part); });
  std::vector<Sum> results;
  for (const SumInOrder& group : of_groups) results.push_back(group.sum());
  return results;
}

std::vector<Sum> Arrays::row_sums(std::size_t rows, double p, const std::vector<double>& divisors, bool in_float,
                                  int threads) const {
  // There may be no rows, and then there are no arrays.
  const std::size_t width = spans_.size() / std::max<std::size_t>(1, rows);
  return grouped_sums([width](std::size_t array) { return array / width; }, rows, p, divisors, in_float, threads);
}

std::vector<Sum> Arrays::group_sums(const std::vector<std::size_t>& group_of, std::size_t groups, double p,
                                    bool in_float, int threads) const {
  check_groups(group_of, spans_.size(), groups);
  const auto group = [&group_of](std::size_t array) { return group_of[array]; };
  return grouped_sums(group, groups, p, std::vector<double>(groups, 1.0), in_float, threads);
}

std::vector<Sum> Arrays::sums_of_each(double p, bool in_float, int threads) const {
  const auto itself = [](std::size_t array) { return array; };
  SumInOrder whole;
  std::vector<Sum> sums =
      grouped_sums(itself, spans_.size(), p, std::vector<double>(spans_.size(), 1.0), in_float, threads, &whole);
  sums.push_back(whole.sum());
  return sums;
}

std::vector<Extremes> Arrays::row_extremes(std::size_t rows, int threads) const {
  const std::vector<Piece> pieces = cut(spans_);
  const std::size_t width = spans_.size() / std::max<std::size_t>(1, rows);
  std::vector<Extremes> found(pieces.size());
  share_out(pieces, threads_worth(pieces, threads, measured_by_one(spans_)), Order::forward, [&](std::size_t i) {
    const Span& span = spans_[pieces[i].array];
    found[i] = kernels_of(span.dtype).extremes(start_of(span, pieces[i]), pieces[i].count);
  });
  std::vector<Extremes> of_rows(rows, Extremes{0.0, std::numeric_limits<double>::infinity(), 0});
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    Extremes& row = of_rows[pieces[i].array / width];
    // Comparisons with NaN are false, so a NaN is taken and then kept. With `std::max` this would depend on the order.
    const bool nan = std::isnan(row.largest);
    row.largest = nan || found[i].largest <= row.largest ? row.largest : found[i].largest;
    row.smallest = std::min(row.smallest, found[i].smallest);
    row.nonfinite += found[i].nonfinite;
  }
  return of_rows;
}

void Arrays::scale(const Arrays& to, Factors wide, Factors narrow, int threads) const {
  const std::vector<Span> from = as_real(spans_), into = as_real(to.spans_);
  const std::vector<Piece> pieces = cut(from);
  const int useful = threads_worth(pieces, threads, read_by_one(from));
  // Backward, because what the norm read last is still in cache.
  share_out(pieces, useful, Order::backward, [&](std::size_t i) {
    const Span& span = from[pieces[i].array];
    const Factors& factors = span.dtype == Dtype::float64 ? wide : narrow;
    kernels_of(span.dtype)
        .scale(start_of(span, pieces[i]), start_of(into[pieces[i].array], pieces[i]), pieces[i].count, factors.first,
               factors.second);
  });
}

void Arrays::scale_groups(const Arrays& to, const std::vector<std::size_t>& group_of,
                          const std::vector<Scaling>& scalings, int threads) const {
  check_groups(group_of, std::min(spans_.size(), to.size()), scalings.size());
  const std::vector<Span> from = as_real(spans_), into = as_real(to.spans_);
  const std::vector<Piece> pieces = cut(from);
  share_out(pieces, threads_worth(pieces, threads, read_by_one(from)), Order::backward, [&](std::size_t i) {
    const Span& span = from[pieces[i].array];
    const Scaling& scaling = scalings[group_of[pieces[i].array]];
    const std::byte* source = start_of(span, pieces[i]);
    std::byte* target = start_of(into[pieces[i].array], pieces[i]);
    // Copied, not multiplied by 1, which would change subnormal numbers.
    if (scaling.keep) {
      // Do not write in place: the memory may be read-only.
      if (source != target) std::memcpy(target, source, static_cast<std::size_t>(pieces[i].count * item_size(span.dtype)));
      return;
    }
    const Factors& factors = span.dtype == Dtype::float64 ? scaling.wide : scaling.narrow;
    kernels_of(span.dtype).scale(source, target, pieces[i].count, factors.first, factors.second);
  });
}

void Arrays::fill_zero(int threads) const {
  const std::vector<Piece> pieces = cut(spans_);
  share_out(pieces, threads_worth(pieces, threads, read_by_one(spans_)), Order::backward, [&](std::size_t i) {
    const Span& span = spans_[pieces[i].array];
    std::memset(start_of(span, pieces[i]), 0, static_cast<std::size_t>(pieces[i].count * item_size(span.dtype)));
  });
}

void Arrays::clamp(double bound, int threads) const {
  const std::vector<Piece> pieces = cut(spans_);
  share_out(pieces, threads_worth(pieces, threads, read_by_one(spans_)), Order::forward, [&](std::size_t i) {
    const Span& span = spans_[pieces[i].array];
    kernels_of(span.dtype).clamp(start_of(span, pieces[i]), pieces[i].count, bound);
  });
}

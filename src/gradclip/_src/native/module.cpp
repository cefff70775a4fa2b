// The Python interface of the kernels.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <thread>
#include <tuple>
#include <utility>

#include "arrays.hpp"
#include "describe.hpp"
#include "differences.hpp"
#include "examples.hpp"
#include "gram.hpp"
#include "noise.hpp"
#include "outer.hpp"
#include "rows.hpp"
#include "settle.hpp"
#include "xla.hpp"

namespace nb = nanobind;
using namespace nb::literals;

using Pair = std::pair<double, double>;

// Releases Python's lock. A daemon thread that takes it again after the main thread has ended is ended by Python, with
// glibc by an exception, and that would abort the process on its way through destructors and nanobind. Such a thread
// sleeps until the process is gone, as it does from Python 3.14 on.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// Arrays, and the Python objects that own their memory, which must stay alive.
struct HeldArrays : Arrays {
  HeldArrays(Arrays arrays, nb::list sources, bool in_order, bool writable)
      : Arrays(std::move(arrays)), sources(std::move(sources)), in_order(in_order), writable(writable) {}
  nb::list sources;
  bool in_order;
  bool writable;
};

static std::pair<HeldArrays, std::vector<int64_t>> held(Described described, nb::list sources) {
  HeldArrays arrays(std::move(described.arrays), std::move(sources), described.in_order, described.writable);
  return {std::move(arrays), std::move(described.left_out)};
}

static nb::capsule capsule_of(xla_ffi::Function* function) {
  return nb::capsule(reinterpret_cast<void*>(function), "xla._CUSTOM_CALL_TARGET");
}

// Vectors are passed as arrays, so that only an address and a count are converted.
static double* numbers_in(const Arrays& arrays) { return reinterpret_cast<double*>(arrays.spans().at(0).data); }

NB_MODULE(_kernels, m) {
  // A thread that sleeps until the process is gone keeps what it holds, which is no fault to warn of.
  nb::set_leak_warnings(false);
  // Release Python's lock while arrays are read.
  const auto unlocked = nb::call_guard<Unlocked, ReadyToThrow>();
  const auto locked = nb::call_guard<ReadyToThrow>();

  nb::class_<Arrays>(m, "Arrays")
      .def_prop_ro("count", &Arrays::count)
      .def_prop_ro("counts", &Arrays::counts)
      .def_prop_ro("dtypes", &Arrays::dtypes)
      .def("__len__", &Arrays::size)
      .def("overlap", &Arrays::overlap, "others"_a = std::vector<Arrays::Stretch>())
      .def(
          "sum",
          [](const Arrays& self, double p, double divisor, bool in_float, int threads) {
            const Sum sum = self.sum(p, divisor, in_float, threads);
            return std::make_pair(sum.value, sum.nonfinite);
          },
          "p"_a, "divisor"_a, "in_float"_a, "threads"_a, unlocked)
      .def(
          "exact_sum",
          [](const Arrays& self, int p, int threads) {
            // Unlocked only here, because creating Python bytes below needs the lock.
            std::vector<std::uint8_t> bytes;
            {
              const Unlocked unlocked;
              bytes = self.exact_sum(p, threads).bytes();
            }
            return nb::make_tuple(nb::bytes(bytes.data(), bytes.size()), ExactSum::kLowest);
          },
          "p"_a, "threads"_a, locked)
      .def(
          "extremes",
          [](const Arrays& self, int threads) {
            const Extremes found = self.extremes(threads);
            return std::make_tuple(found.largest, found.smallest, found.nonfinite);
          },
          "threads"_a, unlocked)
      .def(
          "scale",
          [](const Arrays& self, const Arrays& to, Pair wide, Pair narrow, int threads) {
            self.scale(to, {wide.first, wide.second}, {narrow.first, narrow.second}, threads);
          },
          "to"_a, "wide"_a, "narrow"_a, "threads"_a, unlocked)
      .def("subtract", &subtract, "others"_a, "to"_a, unlocked)
      .def(
          "group_sums",
          [](const Arrays& self, const std::vector<std::size_t>& group_of, std::size_t groups, double p, bool in_float,
             int threads) {
            std::vector<double> values;
            for (const Sum& sum : self.group_sums(group_of, groups, p, in_float, threads)) values.push_back(sum.value);
            return values;
          },
          "group_of"_a, "groups"_a, "p"_a, "in_float"_a, "threads"_a, unlocked)
      .def(
          "sums_of_each",
          [](const Arrays& self, double p, bool in_float, int threads) {
            std::vector<double> values;
            for (const Sum& sum : self.sums_of_each(p, in_float, threads)) values.push_back(sum.value);
            return values;
          },
          "p"_a, "in_float"_a, "threads"_a, unlocked)
      .def(
          "scale_groups",
          [](const Arrays& self, const Arrays& to, const std::vector<std::size_t>& group_of, const Arrays& table,
             std::size_t groups, int threads) {
            const double* numbers = numbers_in(table);
            std::vector<Arrays::Scaling> scalings;
            for (std::size_t i = 0; i < groups; ++i) {
              const auto line = [=](std::size_t number) { return numbers[number * groups + i]; };
              scalings.push_back({line(0) != 0.0, {line(1), line(2)}, {line(3), line(4)}});
            }
            self.scale_groups(to, group_of, scalings, threads);
          },
          "to"_a, "group_of"_a, "table"_a, "groups"_a, "threads"_a, unlocked)
      .def(
          "settle_groups",
          [](const Arrays& self, const std::vector<std::size_t>& group_of, double p, bool in_float, double enough,
             const std::vector<double>& errors, const Arrays& limits, const Arrays& norms, const Arrays& table,
             int threads) {
            const Question asked{p, enough, errors, limits, norms, table};
            return static_cast<int>(settle_groups(self, group_of, asked, in_float, threads));
          },
          "group_of"_a, "p"_a, "in_float"_a, "enough"_a, "errors"_a, "limits"_a, "norms"_a, "table"_a, "threads"_a,
          unlocked)
      .def(
          "settle_rows",
          [](const Arrays& self, const RowCounts& counts, double p, double enough, const std::vector<double>& errors,
             const Arrays& limits, const Arrays& norms, const Arrays& table, int threads) {
            const Question asked{p, enough, errors, limits, norms, table};
            return static_cast<int>(settle_rows(self, counts, asked, threads));
          },
          "counts"_a, "p"_a, "enough"_a, "errors"_a, "limits"_a, "norms"_a, "table"_a, "threads"_a, unlocked)
      .def(
          "sum_rows",
          [](const Arrays& self, const RowCounts& counts, double p, const Arrays& sums, int threads) {
            sum_rows(self, counts, p, numbers_in(sums), threads);
          },
          "counts"_a, "p"_a, "sums"_a, "threads"_a, unlocked)
      .def(
          "scale_rows",
          [](const Arrays& self, const Arrays& to, const RowCounts& counts, const Arrays& table, int threads) {
            scale_rows(self, to, counts, numbers_in(table), threads);
          },
          "to"_a, "counts"_a, "table"_a, "threads"_a, unlocked)
      .def("fill_zero", &Arrays::fill_zero, "threads"_a, unlocked)
      .def("clamp", &Arrays::clamp, "bound"_a, "threads"_a, unlocked);

  nb::class_<HeldArrays, Arrays>(m, "HeldArrays")
      .def_ro("in_order", &HeldArrays::in_order)
      .def_ro("writable", &HeldArrays::writable);

  m.def("describe_buffers", [](nb::list arrays) { return held(describe_buffers(arrays), arrays); }, "arrays"_a,
        locked);
  m.def(
      "describe_tensors",
      [](nb::list tensors, nb::object exchange_api) {
        return held(describe_tensors(tensors, std::move(exchange_api)), tensors);
      },
      "tensors"_a, "exchange_api"_a, locked);
  m.def(
      "describe_on_device",
      [](nb::list tensors, nb::object exchange_api, int device_type, int device_id) -> nb::object {
        const auto found = describe_on_device(tensors, std::move(exchange_api), device_type, device_id);
        if (!found) return nb::none();
        return nb::make_tuple(found->addresses, found->counts, found->kinds, found->apart);
      },
      "tensors"_a, "exchange_api"_a, "device_type"_a, "device_id"_a, locked);
  m.def("xla_power_sums", [] { return capsule_of(xla_power_sums); });
  m.def("xla_add_examples", [] { return capsule_of(xla_add_examples); });
  m.def("xla_entries", [] { return capsule_of(xla_entries); });
  m.def("xla_outer_sums", [] { return capsule_of(xla_outer_sums); });
  m.def("xla_gram_squares", [] { return capsule_of(xla_gram_squares); });
  m.def("xla_extremes", [] { return capsule_of(xla_extremes); });
  m.def(
      "add_examples",
      [](const Arrays& arrays, std::size_t examples, std::array<double, 5> weighing, const Arrays& squares, const Arrays& totals, int threads) {
        const auto [inflate, offset, keep_up_to, kept, numerator] = weighing;
        add_examples(arrays, examples, {inflate, offset, keep_up_to, kept, numerator},
                     numbers_in(squares), numbers_in(totals), threads);
      },
      "arrays"_a, "examples"_a, "weighing"_a, "squares"_a, "totals"_a, "threads"_a, unlocked);
  m.def(
      "outer_sums",
      [](const Arrays* left, const Arrays& right, const Arrays& weights, const Arrays& totals, int64_t blocks,
         int64_t rows, int64_t columns, int threads) {
        outer_sums(left, right, weights, totals, {blocks, rows, columns}, threads);
      },
      "left"_a.none(), "right"_a, "weights"_a, "totals"_a, "blocks"_a, "rows"_a, "columns"_a, "threads"_a, unlocked);
  m.def(
      "gram_squares",
      [](const Arrays& left, const Arrays& right, int64_t sums, int64_t terms, int64_t rows, int64_t columns,
         const Arrays& squares, const Arrays& sizes, int threads) {
        if (squares.count() != sums || sizes.count() != sums) {
          throw std::invalid_argument("squares and sizes must have one number for each sum");
        }
        gram_squares(left, right, {sums, terms, rows, columns}, numbers_in(squares), numbers_in(sizes), threads);
      },
      "left"_a, "right"_a, "sums"_a, "terms"_a, "rows"_a, "columns"_a, "squares"_a, "sizes"_a, "threads"_a, unlocked);
  m.def(
      "add_noise",
      [](std::tuple<double, int, double> target, const Arrays& words, const Arrays& values, const Arrays& sums,
         std::pair<int64_t, int64_t> from) {
        const auto [scale, bits, shift] = target;
        const NoiseProgress made = add_noise({scale, shift, bits}, words, values, sums, {from.first, from.second});
        return std::make_pair(made.used, made.filled);
      },
      "target"_a, "words"_a, "values"_a, "sums"_a, "start"_a, unlocked);
  m.def("fuses", [] { return kernels_of(Dtype::float64).fuses; });
  m.def("variants", &variants);
  m.def("use_variant", &use_variant, "name"_a);
}

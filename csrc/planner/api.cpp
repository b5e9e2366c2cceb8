// The functions that realhf/plan/search/cpp_evaluator.py calls.
#include <memory>

#include "mcmc.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace planner;

// Deserializes a problem from two arrays; cpp_evaluator.py writes the fields in the same order.
struct Reader {
  const int32_t *ints;
  const double *reals;

  int integer() { return *ints++; }
  double real() { return *reals++; }
  Range range() { return {integer(), integer()}; }
  Cost cost() { return {real(), real()}; }

  std::vector<int> integers() {
    std::vector<int> values(integer());
    for (int &value : values) value = integer();
    return values;
  }

  LayoutOption option() {
    LayoutOption o{};
    o.ranks = range(), o.holders = range();
    o.compute.resize(integer());
    for (Cost &c : o.compute) c = cost();
    o.transfer = cost(), o.load = cost(), o.offload = cost();
    o.transient = real(), o.resident = real();
    return o;
  }

  Mfc mfc() {
    Mfc m{};
    m.parents = integers(), m.row_sources = integers();
    for (size_t i = 0; i < m.row_sources.size(); ++i) m.couriers.push_back(integers());
    m.updater = integer(), m.allowed_staleness = integer(), m.home_mfc = integer(), m.batch_size = integer();
    m.offloaded = integer(), m.after_filter = integer();
    m.options.resize(integer());
    for (LayoutOption &o : m.options) o = option();
    return m;
  }
};

Problem read(Reader in, FillEntry fill) {
  Problem p{};
  p.fill = fill;
  p.batch_size = in.integer(), p.n_steps = in.integer();
  p.first_steady_step = in.integer(), p.last_steady_step = in.integer(), p.max_staleness = in.integer();
  p.filter_mfc = in.integer();
  p.capacity = in.real(), p.call_seconds = in.real(), p.cores = in.real();
  p.order = in.integers();
  const int n = static_cast<int>(p.order.size());
  for (int m = 0; m < n; ++m) p.mfcs.push_back(in.mfc());
  const auto n_options = [&p](int m) { return p.mfcs[m].options.size(); };
  for (int m = 0; m < n; ++m)
    if (const int home = p.mfcs[m].home_mfc; home >= 0 && home != m)
      p.mfcs[m].reallocs.emplace_back(m, n_options(m), n_options(home));
  const int n_syncs = in.integer();
  for (int i = 0; i < n_syncs; ++i) {
    const int after = in.integer(), source = in.integer(), target = in.integer();
    p.ema_syncs.push_back({after, source, target, CostTable(n + i, n_options(source), n_options(target))});
  }
  return p;
}

// A problem and the buffers to evaluate it.
struct Planner {
  Problem problem;
  Scratch scratch;

  explicit Planner(Problem p) : problem(std::move(p)), scratch(problem.mfcs.size()) {}
};

// Runs an action; returns 1 if a table entry could not be filled.
template <typename Action>
int guarded(const Action &action) {
  try {
    action();
    return 0;
  } catch (const FillError &) {
    return 1;
  }
}

}  // namespace

EXPORT Planner *planner_new(const int32_t *ints, const double *reals, FillEntry fill) {
  return new Planner(read({ints, reals}, fill));
}

EXPORT void planner_delete(Planner *planner) { delete planner; }

EXPORT int planner_evaluate(Planner *planner, const int32_t *choice, double *seconds, double *peak) {
  return guarded([&] {
    const Value value = evaluate(planner->problem, choice, planner->scratch);
    *seconds = value.seconds, *peak = value.peak;
  });
}

EXPORT int planner_run_chain(Planner *planner, Chain *chain, int64_t n, double temperature) {
  return guarded([&] { run_chain(planner->problem, *chain, n, temperature, planner->scratch); });
}

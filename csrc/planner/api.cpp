// What Python calls (realhf/plan/search/cpp_evaluator.py).
#include <memory>

#include "walk.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using namespace planner;

// Reads a problem from the two streams of numbers that Python writes, field by field in the same order.
struct Reader {
  const int32_t *ints;
  const double *reals;

  int integer() { return *ints++; }
  double real() { return *reals++; }
  Range range() { return {integer(), integer()}; }
  Cost cost() { return {real(), real()}; }

  std::vector<int> integers() {
    std::vector<int> found(integer());
    for (int &value : found) value = integer();
    return found;
  }

  Option option() {
    Option o{};
    o.ranks = range(), o.holders = range();
    o.compute = cost(), o.transfer = cost(), o.load = cost(), o.offload = cost();
    o.transient = real(), o.resident = real();
    return o;
  }

  Mfc mfc() {
    Mfc m{};
    m.parents = integers(), m.sources = integers();
    m.updater = integer(), m.lag = integer(), m.keeper = integer(), m.chunk = integer();
    m.offloaded = integer();
    m.options.resize(integer());
    for (Option &o : m.options) o = option();
    return m;
  }
};

Problem read(Reader in, Fill fill) {
  Problem p{};
  p.fill = fill;
  p.batch_size = in.integer(), p.n_steps = in.integer(), p.n_settled = in.integer(), p.max_staleness = in.integer();
  p.capacity = in.real(), p.call_seconds = in.real(), p.cores = in.real();
  p.order = in.integers();
  const int n = static_cast<int>(p.order.size());
  for (int m = 0; m < n; ++m) p.mfcs.push_back(in.mfc());
  const auto n_options = [&p](int m) { return p.mfcs[m].options.size(); };
  for (int m = 0; m < n; ++m)
    if (const int keeper = p.mfcs[m].keeper; keeper >= 0 && keeper != m)
      p.mfcs[m].moves.emplace_back(m, n_options(m), n_options(keeper));
  const int n_follows = in.integer();
  for (int i = 0; i < n_follows; ++i) {
    const int after = in.integer(), source = in.integer(), target = in.integer();
    p.follows.push_back({after, source, target, Table(n + i, n_options(source), n_options(target))});
  }
  return p;
}

// A problem and the memory to evaluate it in.
struct Planner {
  Problem problem;
  Scratch scratch;

  explicit Planner(Problem p) : problem(std::move(p)), scratch(problem.mfcs.size()) {}
};

// Runs an action; not 0 where a table could not be filled.
template <typename Action>
int guarded(const Action &action) {
  try {
    action();
    return 0;
  } catch (const Failed &) {
    return 1;
  }
}

}  // namespace

EXPORT Planner *planner_new(const int32_t *ints, const double *reals, Fill fill) {
  return new Planner(read({ints, reals}, fill));
}

EXPORT void planner_delete(Planner *planner) { delete planner; }

EXPORT int planner_evaluate(Planner *planner, const int32_t *choice, double *seconds, double *peak) {
  return guarded([&] {
    const Value value = evaluate(planner->problem, choice, planner->scratch);
    *seconds = value.seconds, *peak = value.peak;
  });
}

EXPORT int planner_walk(Planner *planner, Walker *walker, int64_t n, double temperature) {
  return guarded([&] { walk(planner->problem, *walker, n, temperature, planner->scratch); });
}

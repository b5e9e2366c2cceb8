// The reference implementation is realhf/plan/search/evaluate.py; results are equal bit for bit.
#include "evaluate.h"

#include <algorithm>

namespace planner {

namespace {

constexpr double kOomPenalty = 1e12;

// Splits the ranks at all bounds of the options; ranks between two bounds form one rank class.
void split_rank_classes(Scratch &s) {
  s.bounds.clear();
  for (const LayoutOption *option : s.assignment)
    for (const Range &r : {option->ranks, option->holders}) s.bounds.insert(s.bounds.end(), {r.start, r.stop});
  std::sort(s.bounds.begin(), s.bounds.end());
  s.bounds.erase(std::unique(s.bounds.begin(), s.bounds.end()), s.bounds.end());
  s.n_rank_classes = static_cast<int>(s.bounds.size()) - 1;
}

RankSet rank_classes(const Scratch &s, const Range &range) {
  RankSet classes = 0;
  for (int i = 0; i < s.n_rank_classes; ++i)
    if (range.start <= s.bounds[i] && s.bounds[i] < range.stop) classes |= RankSet{1} << i;
  return classes;
}

// Returns who sends rows of a source to an MFC: its holders or, if both are apart, the workers of a courier.
RankSet senders(const Scratch &s, int mfc, int source, const std::vector<int> &couriers) {
  if (s.ranks[mfc] & s.ranks[source]) return s.holders[source];
  RankSet first = 0;
  for (int courier : couriers) {
    const RankSet ranks = s.ranks[courier];
    if (ranks & s.ranks[source]) continue;
    if (ranks & s.ranks[mfc]) return ranks;
    if (!first) first = ranks;
  }
  return first ? first : s.holders[source];
}

// Lists the operations of a call of every MFC, row transfer first.
void list_call_ops(Problem &problem, const int *choice, Scratch &s) {
  const int n = static_cast<int>(problem.mfcs.size());
  for (int m = 0; m < n; ++m) {
    s.ranks[m] = rank_classes(s, s.assignment[m]->ranks);
    s.holders[m] = rank_classes(s, s.assignment[m]->holders);
  }
  for (int m = 0; m < n; ++m) {
    Mfc &mfc = problem.mfcs[m];
    const LayoutOption &option = *s.assignment[m];
    const int home = mfc.home_mfc;
    std::vector<OpSpec> &ops = s.ops[m];
    RankSet transfer_ranks = s.ranks[m];
    for (size_t i = 0; i < mfc.row_sources.size(); ++i)
      transfer_ranks |= senders(s, m, mfc.row_sources[i], mfc.couriers[i]);
    ops.assign(1, {transfer_ranks, option.transfer});
    if (mfc.offloaded) ops.push_back({s.ranks[home], s.assignment[home]->load});
    s.copy_bytes[m] = s.rings[m] = 0;
    if (!mfc.reallocs.empty()) {
      const ReallocCost &realloc = mfc.reallocs[0].at(choice[m], choice[home], problem.fill);
      ops.push_back({s.ranks[home] | s.ranks[m], realloc.cost});
      s.copy_bytes[m] = realloc.nbytes, s.rings[m] = realloc.rings;
    }
    s.compute_ops[m] = ops.size();
    ops.push_back({s.ranks[m], {}});
    for (EMASync &sync : problem.ema_syncs) {
      if (sync.after != m) continue;
      const ReallocCost &realloc = sync.costs.at(choice[sync.source], choice[sync.target], problem.fill);
      ops.push_back({s.ranks[sync.source] | s.ranks[sync.target], realloc.cost});
    }
    if (mfc.offloaded) ops.push_back({s.ranks[home], s.assignment[home]->offload});
  }
}

double peak_bytes(const Problem &problem, const Scratch &s) {
  double peak = 0;
  for (int i = 0; i < s.n_rank_classes; ++i) {
    const RankSet bit = RankSet{1} << i;
    double resident = 0, transient = 0, rings = 0;
    for (size_t m = 0; m < problem.mfcs.size(); ++m) {
      const Mfc &mfc = problem.mfcs[m];
      const int home = mfc.home_mfc;
      double needed = s.ranks[m] & bit ? s.assignment[m]->transient + s.copy_bytes[m] : 0;
      if (mfc.offloaded) {
        if (s.ranks[home] & bit) needed += s.assignment[home]->resident;
      } else if (home == static_cast<int>(m) && (s.ranks[m] & bit)) {
        resident += s.assignment[m]->resident;
      }
      transient = std::max(transient, needed);
      if (s.rings[m] > 0 && ((s.ranks[home] | s.ranks[m]) & bit)) rings = std::max(rings, s.rings[m]);
    }
    peak = std::max(peak, resident + transient + rings);
  }
  return peak;
}

// The scheduler of plan/compile/schedule.py for steps of equal size; prompts are only counted.
class Master {
 public:
  Master(const Problem &problem, Scratch &scratch) : problem_(problem), s_(scratch) {
    s_.next.assign(problem.mfcs.size(), 0), s_.done.assign(problem.mfcs.size(), 0);
    s_.running.assign(problem.mfcs.size(), 0), s_.n_calls.assign(problem.mfcs.size(), 0);
  }

  double seconds_per_step() {
    fetch_ahead();
    s_.queues.share_cores();
    for (int m = s_.queues.next_finished(); m >= 0; m = s_.queues.next_finished()) {
      s_.running[m] = 0, s_.done[m] = s_.next[m];
      while (n_finished_ < problem_.n_steps && is_finished()) end_step();
      issue();
      fetch_ahead();
      s_.queues.share_cores();
    }
    const int n = problem_.last_steady_step - problem_.first_steady_step;
    return n > 0 ? (last_end_ - first_end_) / n : first_end_;
  }

 private:
  bool is_finished() const {
    const int stop = (n_finished_ + 1) * problem_.batch_size;
    return std::all_of(s_.done.begin(), s_.done.end(), [stop](int done) { return done >= stop; });
  }

  void end_step() {
    if (n_finished_ == problem_.first_steady_step) first_end_ = s_.queues.now;
    if (n_finished_ == problem_.last_steady_step) last_end_ = s_.queues.now;
    ++n_finished_;
  }

  void fetch_ahead() {
    const int wanted = std::min(problem_.n_steps, n_finished_ + 2 + problem_.max_staleness);
    for (; n_fetched_ < wanted; issue()) ++n_fetched_;
  }

  void issue() {
    s_.batch.clear();
    for (int m : problem_.order)
      if (start_if_ready(m)) s_.batch.push_back(m);
    for (int m : s_.batch) s_.queues.open(m, static_cast<int>(s_.ops[m].size()));
    for (int m : s_.batch) s_.queues.send(m, s_.ops[m][0]);
    for (int m : s_.batch)
      for (size_t i = 1; i < s_.ops[m].size(); ++i) s_.queues.send(m, s_.ops[m][i]);
  }

  bool start_if_ready(int m) {
    const Mfc &mfc = problem_.mfcs[m];
    const int step = s_.next[m] / problem_.batch_size;
    if (s_.running[m] || step >= n_fetched_) return false;
    if (mfc.updater >= 0 && s_.done[mfc.updater] < (step - mfc.allowed_staleness) * problem_.batch_size) return false;
    if (problem_.filter_mfc >= 0 && s_.done[problem_.filter_mfc] < (step + mfc.after_filter) * problem_.batch_size)
      return false;
    const int stop = std::min(s_.next[m] + mfc.batch_size, (step + 1) * problem_.batch_size);
    for (int parent : mfc.parents)
      if (s_.done[parent] < stop) return false;
    s_.next[m] = stop, s_.running[m] = 1;
    const std::vector<Cost> &costs = s_.assignment[m]->compute;
    s_.ops[m][s_.compute_ops[m]].cost = costs[s_.n_calls[m]++ % costs.size()];
    return true;
  }

  const Problem &problem_;
  Scratch &s_;
  int n_fetched_ = 0, n_finished_ = 0;
  double first_end_ = 0, last_end_ = 0;
};

}  // namespace

Scratch::Scratch(size_t n_mfcs)
    : assignment(n_mfcs),
      ranks(n_mfcs),
      holders(n_mfcs),
      copy_bytes(n_mfcs),
      rings(n_mfcs),
      ops(n_mfcs),
      compute_ops(n_mfcs) {}

Value evaluate(Problem &problem, const int *choice, Scratch &scratch) {
  const int n = static_cast<int>(problem.mfcs.size());
  for (int m = 0; m < n; ++m) scratch.assignment[m] = &problem.mfcs[m].options[choice[m]];
  split_rank_classes(scratch);
  list_call_ops(problem, choice, scratch);
  scratch.queues.reset(scratch.n_rank_classes, n, problem.cores, problem.call_seconds);
  return {Master(problem, scratch).seconds_per_step(), peak_bytes(problem, scratch)};
}

double objective(const Problem &problem, Value value) {
  return value.peak <= problem.capacity ? value.seconds : kOomPenalty * (value.peak / problem.capacity);
}

}  // namespace planner

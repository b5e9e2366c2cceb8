// Seconds per step and bytes of the fullest worker for a choice of options: the twin of realhf/plan/search/evaluate.py.
#include "evaluate.h"

#include <algorithm>

namespace planner {

namespace {

constexpr double kOverfull = 1e12;

// Cuts the ranks where any option of the choice begins or ends; each run between two cuts is one worker.
void cut_atoms(Scratch &s) {
  s.bounds.clear();
  for (const Option *option : s.chosen)
    for (const Range &r : {option->ranks, option->holders}) s.bounds.insert(s.bounds.end(), {r.start, r.stop});
  std::sort(s.bounds.begin(), s.bounds.end());
  s.bounds.erase(std::unique(s.bounds.begin(), s.bounds.end()), s.bounds.end());
  s.n_atoms = static_cast<int>(s.bounds.size()) - 1;
}

Ranks atoms_of(const Scratch &s, const Range &range) {
  Ranks found = 0;
  for (int i = 0; i < s.n_atoms; ++i)
    if (range.start <= s.bounds[i] && s.bounds[i] < range.stop) found |= Ranks{1} << i;
  return found;
}

// Lists what a call of every MFC asks of the workers; the first piece of work is the transfer of its rows.
void list_work(Problem &problem, const int *choice, Scratch &s) {
  const int n = static_cast<int>(problem.mfcs.size());
  for (int m = 0; m < n; ++m) {
    s.ranks[m] = atoms_of(s, s.chosen[m]->ranks);
    s.holders[m] = atoms_of(s, s.chosen[m]->holders);
  }
  for (int m = 0; m < n; ++m) {
    Mfc &mfc = problem.mfcs[m];
    const Option &option = *s.chosen[m];
    std::vector<Work> &work = s.work[m];
    Ranks around = s.ranks[m];
    for (int source : mfc.sources) around |= s.holders[source];
    work.assign(1, {around, option.transfer});
    if (mfc.offloaded) work.push_back({s.ranks[mfc.keeper], s.chosen[mfc.keeper]->load});
    s.borrowed[m] = s.rings[m] = 0;
    if (!mfc.moves.empty()) {
      const Move &move = mfc.moves[0].at(choice[m], choice[mfc.keeper], problem.fill);
      work.push_back({s.ranks[mfc.keeper] | s.ranks[m], move.cost});
      s.borrowed[m] = move.nbytes, s.rings[m] = move.rings;
    }
    work.push_back({s.ranks[m], option.compute});
    for (Follow &follow : problem.follows) {
      if (follow.after != m) continue;
      const Move &move = follow.costs.at(choice[follow.source], choice[follow.target], problem.fill);
      work.push_back({s.ranks[follow.source] | s.ranks[follow.target], move.cost});
    }
    if (mfc.offloaded) work.push_back({s.ranks[mfc.keeper], s.chosen[mfc.keeper]->offload});
  }
}

double peak_bytes(const Problem &problem, const Scratch &s) {
  double peak = 0;
  for (int atom = 0; atom < s.n_atoms; ++atom) {
    const Ranks bit = Ranks{1} << atom;
    double resident = 0, transient = 0, rings = 0;
    for (size_t m = 0; m < problem.mfcs.size(); ++m) {
      const Mfc &mfc = problem.mfcs[m];
      double needed = s.ranks[m] & bit ? s.chosen[m]->transient + s.borrowed[m] : 0;
      if (mfc.offloaded) {
        if (s.ranks[mfc.keeper] & bit) needed += s.chosen[mfc.keeper]->resident;
      } else if (mfc.keeper == static_cast<int>(m) && (s.ranks[m] & bit)) {
        resident += s.chosen[m]->resident;
      }
      transient = std::max(transient, needed);
      if (s.rings[m] > 0 && ((s.ranks[mfc.keeper] | s.ranks[m]) & bit)) rings = std::max(rings, s.rings[m]);
    }
    peak = std::max(peak, resident + transient + rings);
  }
  return peak;
}

// The scheduler of plan/compile/schedule.py for steps of equal size, in which only the numbers of prompts matter.
class Master {
 public:
  Master(const Problem &problem, Scratch &scratch) : problem_(problem), s_(scratch) {
    s_.next.assign(problem.mfcs.size(), 0), s_.done.assign(problem.mfcs.size(), 0);
    s_.running.assign(problem.mfcs.size(), 0);
  }

  double seconds_per_step() {
    fetch_ahead();
    s_.inboxes.share_cores();
    for (int m = s_.inboxes.next_over(); m >= 0; m = s_.inboxes.next_over()) {
      s_.running[m] = 0, s_.done[m] = s_.next[m];
      while (n_finished_ < problem_.n_steps && is_finished()) end_step();
      issue();
      fetch_ahead();
      s_.inboxes.share_cores();
    }
    return problem_.n_settled > 0 ? (settled_end_ - first_end_) / problem_.n_settled : first_end_;
  }

 private:
  bool is_finished() const {
    const int stop = (n_finished_ + 1) * problem_.batch_size;
    return std::all_of(s_.done.begin(), s_.done.end(), [stop](int done) { return done >= stop; });
  }

  void end_step() {
    if (n_finished_ == 0) first_end_ = s_.inboxes.now;
    if (n_finished_ == problem_.n_settled) settled_end_ = s_.inboxes.now;
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
    for (int m : s_.batch) s_.inboxes.open(m, static_cast<int>(s_.work[m].size()));
    for (int m : s_.batch) s_.inboxes.send(m, s_.work[m][0]);
    for (int m : s_.batch)
      for (size_t i = 1; i < s_.work[m].size(); ++i) s_.inboxes.send(m, s_.work[m][i]);
  }

  bool start_if_ready(int m) {
    const Mfc &mfc = problem_.mfcs[m];
    const int step = s_.next[m] / problem_.batch_size;
    if (s_.running[m] || step >= n_fetched_) return false;
    if (mfc.updater >= 0 && s_.done[mfc.updater] < (step - mfc.lag) * problem_.batch_size) return false;
    const int stop = std::min(s_.next[m] + mfc.chunk, (step + 1) * problem_.batch_size);
    for (int parent : mfc.parents)
      if (s_.done[parent] < stop) return false;
    s_.next[m] = stop, s_.running[m] = 1;
    return true;
  }

  const Problem &problem_;
  Scratch &s_;
  int n_fetched_ = 0, n_finished_ = 0;
  double first_end_ = 0, settled_end_ = 0;
};

}  // namespace

Scratch::Scratch(size_t n_mfcs)
    : chosen(n_mfcs), ranks(n_mfcs), holders(n_mfcs), borrowed(n_mfcs), rings(n_mfcs), work(n_mfcs) {}

Value evaluate(Problem &problem, const int *choice, Scratch &scratch) {
  const int n = static_cast<int>(problem.mfcs.size());
  for (int m = 0; m < n; ++m) scratch.chosen[m] = &problem.mfcs[m].options[choice[m]];
  cut_atoms(scratch);
  list_work(problem, choice, scratch);
  scratch.inboxes.reset(scratch.n_atoms, n, problem.cores, problem.call_seconds);
  return {Master(problem, scratch).seconds_per_step(), peak_bytes(problem, scratch)};
}

double objective(const Problem &problem, Value value) {
  return value.peak <= problem.capacity ? value.seconds : kOverfull * (value.peak / problem.capacity);
}

}  // namespace planner

// Evaluation of a choice of options: seconds per step and peak memory of a worker.
#pragma once

#include <vector>

#include "event_sim.h"
#include "problem.h"

namespace planner {

struct Value {
  double seconds, peak;
};

// Buffers of evaluate(), reused to avoid allocations.
struct Scratch {
  explicit Scratch(size_t n_mfcs);

  std::vector<const LayoutOption *> assignment;
  std::vector<RankSet> ranks, holders;
  std::vector<double> copy_bytes, rings;
  std::vector<std::vector<OpSpec>> ops;
  std::vector<size_t> compute_ops, n_calls;  // the number of the computing operation; calls so far
  std::vector<int> bounds, next, done, batch;
  std::vector<char> running;
  int n_rank_classes = 0;
  WorkerQueues queues;
};

// The options may have at most kMaxRankClasses + 1 different bounds of ranks and holders. Throws FillError.
Value evaluate(Problem &problem, const int *choice, Scratch &scratch);
double objective(const Problem &problem, Value value);

}  // namespace planner

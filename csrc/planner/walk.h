// One chain of Metropolis-Hastings over choices: the twin of ``walk`` in realhf/plan/search/mcmc.py.
#pragma once

#include "evaluate.h"

namespace planner {

// Where a chain stands, as Python sees it too. `random` is the state of its random numbers.
struct Walker {
  int32_t *choice, *best;
  double value, best_value;
  uint64_t random;
};

// Makes `n` proposals at a temperature that is a share of the best value.
void walk(Problem &problem, Walker &walker, int64_t n, double temperature, Scratch &scratch);

}  // namespace planner

// A Metropolis-Hastings chain over choices, as in realhf/plan/search/mcmc.py.
#pragma once

#include "evaluate.h"

namespace planner {

// SplitMix64 (Steele, Lea and Flood, 2014).
struct SplitMix64 {
  uint64_t state;

  uint64_t next();
  double uniform();  // 0 <= x < 1
};

// The state of a chain; the layout is shared with Python.
struct Chain {
  int32_t *choice, *best;
  double value, best_value;
  SplitMix64 rng;
};

// Makes `n` proposals at a temperature relative to the best value.
void run_chain(Problem &problem, Chain &chain, int64_t n, double temperature, Scratch &scratch);

}  // namespace planner

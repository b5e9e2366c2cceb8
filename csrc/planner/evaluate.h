// What a choice of options comes to.
#pragma once

#include <vector>

#include "inboxes.h"
#include "problem.h"

namespace planner {

struct Value {
  double seconds, peak;
};

// What evaluate works in: kept from plan to plan, so that nothing is allocated.
struct Scratch {
  explicit Scratch(size_t n_mfcs);

  std::vector<const Option *> chosen;
  std::vector<Ranks> ranks, holders;
  std::vector<double> borrowed, rings;
  std::vector<std::vector<Work>> work;
  std::vector<int> bounds, next, done, batch;
  std::vector<char> running;
  int n_atoms = 0;
  Inboxes inboxes;
};

// At most kMaxRanks + 1 different starts and stops of ranks and holders; Failed where a table cannot be filled.
Value evaluate(Problem &problem, const int *choice, Scratch &scratch);
double objective(const Problem &problem, Value value);

}  // namespace planner

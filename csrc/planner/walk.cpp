#include "walk.h"

#include <algorithm>
#include <cmath>

namespace planner {

namespace {

constexpr double kOneMore = 0.25;

// SplitMix64 (Steele, Lea and Flood, 2014).
uint64_t draw(uint64_t &state) {
  uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

double uniform(uint64_t &state) { return static_cast<double>(draw(state) >> 11) * 0x1p-53; }

// Gives one MFC another option, and with some luck one more.
void propose(const Problem &problem, const std::vector<int> &free, uint64_t &random, int32_t *choice) {
  do {
    const int m = free[draw(random) % free.size()];
    const size_t n = problem.mfcs[m].options.size();
    choice[m] = static_cast<int32_t>((choice[m] + 1 + draw(random) % (n - 1)) % n);
  } while (uniform(random) < kOneMore);
}

}  // namespace

void walk(Problem &problem, Walker &walker, int64_t n, double temperature, Scratch &scratch) {
  const size_t size = problem.mfcs.size();
  std::vector<int> free;
  for (size_t m = 0; m < size; ++m)
    if (problem.mfcs[m].options.size() > 1) free.push_back(static_cast<int>(m));
  if (free.empty()) return;
  std::vector<int32_t> candidate(size);
  for (int64_t i = 0; i < n; ++i) {
    std::copy_n(walker.choice, size, candidate.begin());
    propose(problem, free, walker.random, candidate.data());
    const double value = objective(problem, evaluate(problem, candidate.data(), scratch));
    const double worse = value - walker.value, scale = temperature * walker.best_value;
    if (worse > 0 && (scale == 0 || uniform(walker.random) >= std::exp(-worse / scale))) continue;
    std::copy_n(candidate.begin(), size, walker.choice);
    walker.value = value;
    if (value < walker.best_value) {
      walker.best_value = value;
      std::copy_n(candidate.begin(), size, walker.best);
    }
  }
}

}  // namespace planner

#include "mcmc.h"

#include <algorithm>
#include <cmath>

namespace planner {

namespace {

constexpr double kExtraMutation = 0.25;

// Changes the option of one MFC, and of further ones with probability kExtraMutation each.
void propose(const Problem &problem, const std::vector<int> &free, SplitMix64 &rng, int32_t *choice) {
  do {
    const int m = free[rng.next() % free.size()];
    const size_t n = problem.mfcs[m].options.size();
    choice[m] = static_cast<int32_t>((choice[m] + 1 + rng.next() % (n - 1)) % n);
  } while (rng.uniform() < kExtraMutation);
}

}  // namespace

uint64_t SplitMix64::next() {
  uint64_t z = state += 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

double SplitMix64::uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

void run_chain(Problem &problem, Chain &chain, int64_t n, double temperature, Scratch &scratch) {
  const size_t size = problem.mfcs.size();
  std::vector<int> free;
  for (size_t m = 0; m < size; ++m)
    if (problem.mfcs[m].options.size() > 1) free.push_back(static_cast<int>(m));
  if (free.empty()) return;
  std::vector<int32_t> candidate(size);
  for (int64_t i = 0; i < n; ++i) {
    std::copy_n(chain.choice, size, candidate.begin());
    propose(problem, free, chain.rng, candidate.data());
    const double value = objective(problem, evaluate(problem, candidate.data(), scratch));
    const double increase = value - chain.value, scale = temperature * chain.best_value;
    if (increase > 0 && (scale == 0 || chain.rng.uniform() >= std::exp(-increase / scale))) continue;
    std::copy_n(candidate.begin(), size, chain.choice);
    chain.value = value;
    if (value < chain.best_value) {
      chain.best_value = value;
      std::copy_n(candidate.begin(), size, chain.best);
    }
  }
}

}  // namespace planner

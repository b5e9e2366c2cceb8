// One row of logits, of which a token is drawn, on a CPU.
// Only the few tokens around the top-p boundary are sorted.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "sampling.h"
#include "simd.h"

namespace realhf {
namespace {

constexpr int64_t kBlock = 8 * kLanes;  // tokens per block maximum and block sum
constexpr int32_t kBuckets = 512;       // histogram of distances from the largest logit
constexpr float kBucketsPerUnit = 16.0f;
constexpr int64_t kFewKeys = 48;

// Keys sort by likelihood: the float as an integer of the same order, with ties in favour of the lowest id.
uint64_t key_of(float x, int64_t id) {
  x += 0.0f;  // no negative zero
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (static_cast<uint64_t>(ordered) << 32) | (UINT32_MAX - static_cast<uint32_t>(id));
}

int64_t id_of(uint64_t key) { return UINT32_MAX - static_cast<uint32_t>(key); }

REALHF_SIMD_CLONES void scale(const float* logits, int64_t size, float temperature, float* scaled) {
  for (int64_t i = 0; i < size; ++i) scaled[i] = logits[i] / temperature;
}

REALHF_SIMD_CLONES void find_maxima(const float* scaled, int64_t n_blocks, float* maxima) {
  for (int64_t block = 0; block < n_blocks; ++block, scaled += kBlock) {
    Floats most = load(scaled);
    for (int64_t i = kLanes; i < kBlock; i += kLanes) most = larger(load(scaled + i), most);
    maxima[block] = largest_lane(most);
  }
}

REALHF_SIMD_CLONES void weigh(const float* scaled, int64_t n_blocks, float largest, float* weights, double* sums) {
  for (int64_t block = 0; block < n_blocks; ++block, scaled += kBlock, weights += kBlock) {
    Floats sum = {};
    for (int64_t i = 0; i < kBlock; i += kLanes) {
      const Floats weight = exp_of(load(scaled + i) - largest);
      store(weights + i, weight);
      sum += weight;
    }
    sums[block] = sum_of_lanes(sum);
  }
}

REALHF_SIMD_CLONES void place(const float* scaled, int64_t size, float largest, int32_t* buckets) {
  for (int64_t i = 0; i < size; ++i) {
    const float distance = (largest - scaled[i]) * kBucketsPerUnit;
    const float bounded = distance < kBuckets - 1 ? distance : kBuckets - 1;
    buckets[i] = static_cast<int32_t>(bounded);
  }
}

REALHF_SIMD_CLONES bool holds(const int32_t* buckets, int32_t bucket) {
  int32_t found = 0;
  for (int64_t i = 0; i < kBlock; ++i) found |= buckets[i] == bucket ? 1 : 0;
  return found;
}

struct Pick {
  int64_t id;
  double log_mass;  // of the candidates
};

// How tokens are drawn; realhf/ops/sampling.py documents the options.
struct DrawRule {
  float temperature;  // 0: the most likely token
  int64_t top_k;      // 0: all, else less than the vocabulary
  double top_p;
  const int64_t* forbidden;
  int64_t n_forbidden;
};

struct Sampled {
  int64_t token;  // kNoToken: the logits are not finite
  float logprob, sampling_logprob;
};

// One row of logits and its buffers. Weights are e^(scaled - largest); the row is padded to whole blocks with tokens
// of weight 0. The order of sums does not depend on the number of threads.
class Row {
 public:
  explicit Row(int64_t vocab)
      : vocab_(vocab),
        n_blocks_((vocab + kBlock - 1) / kBlock),
        scaled_(new float[n_blocks_ * kBlock]),
        weights_(new float[n_blocks_ * kBlock]),
        maxima_(n_blocks_),
        sums_(n_blocks_) {
    std::fill(scaled_.get() + vocab, scaled_.get() + n_blocks_ * kBlock, -kInfinity);
  }

  // Draws a token by the number `u` in [0, 1); the forbidden ones are left out if the row is restricted.
  Sampled draw(const float* logits, const DrawRule& rule, bool is_restricted, double u);

 private:
  struct Place {  // a token in order of likelihood; key 0: none
    uint64_t key = 0;
    double reach = 0.0;  // cumulative weight up to and including it
  };

  void read(const float* logits, float temperature, const int64_t* forbidden, int64_t n_forbidden);
  // False if a logit is NaN or +inf, or no allowed one is finite; the searches below need a finite row.
  bool is_finite() const { return std::isfinite(total_) && std::isfinite(log_all_); }
  double logprob(int64_t id) const { return scaled_[id] - log_all_; }  // over all tokens, including forbidden ones
  double logprob(const Pick& pick) const { return scaled_[pick.id] - pick.log_mass; }

  int64_t most_likely() const;
  Pick from_all(double u) const;
  Pick from_top_k(double u, int64_t k, double top_p);
  Pick from_top_p(double u, double top_p);
  double log_mass(double weight) const { return largest_ + std::log(weight); }
  void rank(int64_t k);
  template <typename Reached>
  Place find(const Reached& reached);
  template <typename Reached>
  Place find_in_bucket(int32_t bucket, double before, const Reached& reached);

  int64_t vocab_, n_blocks_;
  std::unique_ptr<float[]> scaled_, weights_;
  std::vector<float> maxima_;
  std::vector<double> sums_;
  float largest_ = 0.0f;
  double total_ = 0.0, log_all_ = 0.0;
  std::unique_ptr<int32_t[]> buckets_;
  std::array<double, kBuckets> bucket_weights_;
  std::vector<uint64_t> keys_;
};

void Row::read(const float* logits, float temperature, const int64_t* forbidden, int64_t n_forbidden) {
  if (temperature == 0.0f || temperature == 1.0f) {
    std::memcpy(scaled_.get(), logits, vocab_ * sizeof(float));
  } else {
    scale(logits, vocab_, temperature, scaled_.get());
  }
  std::vector<double> banned;
  for (int64_t i = 0; i < n_forbidden; ++i) {
    banned.push_back(scaled_[forbidden[i]]);  // -inf for a repeated id
    scaled_[forbidden[i]] = -kInfinity;
  }
  find_maxima(scaled_.get(), n_blocks_, maxima_.data());
  largest_ = *std::max_element(maxima_.begin(), maxima_.end());
  weigh(scaled_.get(), n_blocks_, largest_, weights_.get(), sums_.data());
  total_ = 0.0;
  for (const double sum : sums_) total_ += sum;
  log_all_ = log_mass(total_);
  for (const double x : banned) {  // log(e^a + e^b): forbidden logits may be far larger than allowed ones
    if (std::isnan(log_all_)) break;  // min and max ignore a NaN that is their second argument
    const double high = std::max(x, log_all_), low = std::min(x, log_all_);
    if (low != -kInfinity) log_all_ = high + std::log1p(std::exp(low - high));
  }
}

int64_t Row::most_likely() const {
  const int64_t block = std::find(maxima_.begin(), maxima_.end(), largest_) - maxima_.begin();
  return std::find(scaled_.get() + block * kBlock, scaled_.get() + vocab_, largest_) - scaled_.get();
}

Pick Row::from_all(double u) const {
  const double target = u * total_, log_total = log_mass(total_);
  double before = 0.0;
  for (int64_t block = 0; block < n_blocks_; ++block) {
    if (!(before + sums_[block] > target)) {
      before += sums_[block];
      continue;
    }
    int64_t last = -1;  // block sums are rounded: if no token passes the target, take the last one
    for (int64_t id = block * kBlock; id < (block + 1) * kBlock; ++id) {
      if (!(weights_[id] > 0.0f)) continue;
      last = id;
      before += weights_[id];
      if (before > target) break;
    }
    return {last, log_total};
  }
  return {most_likely(), log_total};  // u is 1
}

// Sets keys_ to the k largest keys, in descending order.
void Row::rank(int64_t k) {
  float bound = -kInfinity;  // at least k tokens reach it
  if (n_blocks_ > k) {
    std::vector<float> ranked = maxima_;
    std::nth_element(ranked.begin(), ranked.begin() + k - 1, ranked.end(), std::greater<>());
    bound = ranked[k - 1];
  }
  keys_.clear();
  for (int64_t block = 0; block < n_blocks_; ++block) {
    if (maxima_[block] < bound) continue;
    for (int64_t id = block * kBlock; id < std::min((block + 1) * kBlock, vocab_); ++id) {
      if (scaled_[id] >= bound) keys_.push_back(key_of(scaled_[id], id));
    }
  }
  if (static_cast<int64_t>(keys_.size()) > k) {
    std::nth_element(keys_.begin(), keys_.begin() + k, keys_.end(), std::greater<>());
    keys_.resize(k);
  }
  std::sort(keys_.begin(), keys_.end(), std::greater<>());
}

Pick Row::from_top_k(double u, int64_t k, double top_p) {
  rank(k);
  double mass = 0.0, kept = 0.0, reach = 0.0;
  for (const uint64_t key : keys_) mass += weights_[id_of(key)];
  for (const uint64_t key : keys_) {
    if (kept >= top_p * mass) break;
    kept += weights_[id_of(key)];
  }
  for (const uint64_t key : keys_) {
    reach += weights_[id_of(key)];
    if (reach > u * kept) return {id_of(key), log_mass(kept)};
  }
  return {most_likely(), log_mass(kept)};
}

// The first token in order of likelihood whose cumulative weight satisfies `reached`.
template <typename Reached>
Row::Place Row::find(const Reached& reached) {
  double before = 0.0;
  for (int32_t bucket = 0; bucket < kBuckets; ++bucket) {
    if (reached(before + bucket_weights_[bucket])) return find_in_bucket(bucket, before, reached);
    before += bucket_weights_[bucket];
  }
  return {};
}

template <typename Reached>
Row::Place Row::find_in_bucket(int32_t bucket, double before, const Reached& reached) {
  keys_.clear();
  for (int64_t first = 0; first < n_blocks_ * kBlock; first += kBlock) {
    if (!holds(buckets_.get() + first, bucket)) continue;
    for (int64_t id = first; id < first + kBlock; ++id) {
      if (buckets_[id] == bucket && weights_[id] > 0.0f) keys_.push_back(key_of(scaled_[id], id));
    }
  }
  auto begin = keys_.begin(), end = keys_.end();
  while (end - begin > kFewKeys) {  // quickselect by weight; keys are distinct, so no part is empty
    std::array<uint64_t, 3> some = {*begin, begin[(end - begin) / 2], end[-1]};
    std::sort(some.begin(), some.end());
    const auto middle = std::partition(begin, end, [pivot = some[1]](uint64_t key) { return key > pivot; });
    double upper = 0.0;
    for (auto key = begin; key != middle; ++key) upper += weights_[id_of(*key)];
    if (reached(before + upper)) {
      end = middle;
    } else {
      before += upper;
      begin = middle;
    }
  }
  std::sort(begin, end, std::greater<>());
  Place found;
  for (; begin != end; ++begin) {
    before += weights_[id_of(*begin)];
    found = {*begin, before};
    if (reached(before)) break;
  }
  return found;
}

Pick Row::from_top_p(double u, double top_p) {
  if (!buckets_) buckets_.reset(new int32_t[n_blocks_ * kBlock]);
  place(scaled_.get(), n_blocks_ * kBlock, largest_, buckets_.get());
  bucket_weights_.fill(0.0);
  for (int64_t id = 0; id < vocab_; ++id) bucket_weights_[buckets_[id]] += weights_[id];
  double mass = 0.0;
  for (const double weight : bucket_weights_) mass += weight;
  const Place last = find([=](double reach) { return reach >= top_p * mass; });
  const Place drawn = find([=](double reach) { return reach > u * last.reach; });
  return {id_of(std::max(drawn.key, last.key)), log_mass(last.reach)};
}

Sampled Row::draw(const float* logits, const DrawRule& rule, bool is_restricted, double u) {
  read(logits, rule.temperature, rule.forbidden, is_restricted ? rule.n_forbidden : 0);
  if (!is_finite()) return {kNoToken, NAN, NAN};
  const bool is_greedy = rule.temperature == 0.0f;
  const Pick pick = is_greedy          ? Pick{most_likely(), 0.0}
                    : rule.top_k > 0   ? from_top_k(u, rule.top_k, rule.top_p)
                    : rule.top_p < 1.0 ? from_top_p(u, rule.top_p)
                                       : from_all(u);
  return {pick.id, static_cast<float>(logprob(pick.id)), is_greedy ? 0.0f : static_cast<float>(logprob(pick))};
}

}  // namespace
}  // namespace realhf

// Token sampling: CUDA kernels, one thread block per row. realhf/ops/sampling.py documents the operators, sampling.cpp
// has the schemas. Weights are integers, so sums do not depend on the order of threads; boundaries are found by radix
// select, without sorting.
#include <cmath>
#include <tuple>

#include "device.h"
#include "sampling.h"

namespace realhf {
namespace {

constexpr int kThreads = 512;
constexpr int kDigits = 256;
constexpr int kDigitBits = 8;
constexpr float kUnit = 0x1p40f;  // weight of the most likely token; 2^23 of them do not overflow 64 bits

using Word = unsigned long long;  // the 64-bit type of atomicAdd

struct Options {
  const int64_t* forbid;
  int64_t n_forbidden;
  const bool* forbid_rows;
  float temperature;
  int64_t top_k;
  double top_p;
  int64_t vocab;
};

struct Row {
  const float* logits;
  const Options* options;
  bool restricted;

  __device__ float scaled(int64_t id) const {
    const float t = options->temperature;
    return t == 0.0f || t == 1.0f ? logits[id] : logits[id] / t;
  }

  __device__ float allowed(int64_t id) const {
    for (int64_t i = 0; restricted && i < options->n_forbidden; ++i) {
      if (options->forbid[i] == id) return -INFINITY;
    }
    return scaled(id);
  }
};

// Sorts by likelihood: the float as an integer of the same order, with ties in favour of the lowest id.
__device__ Word key_of(float x, int64_t id) {
  const unsigned bits = __float_as_uint(x + 0.0f);  // no negative zero
  const unsigned ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
  return (static_cast<Word>(ordered) << 32) | (0xffffffffu - static_cast<unsigned>(id));
}

__device__ Word weight_of(float x, float largest) { return __float2ull_rn(expf(x - largest) * kUnit); }

__device__ float log_mass(float largest, Word mass) {
  return static_cast<float>(largest + log(static_cast<double>(mass) / kUnit));
}

// Reduces over the block; every thread gets the result.
template <typename Value, typename Combine>
__device__ Value over_block(Value value, Combine combine) {
  __shared__ Value parts[kThreads];
  __syncthreads();  // wait for readers of the previous reduction
  parts[threadIdx.x] = value;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) parts[threadIdx.x] = combine(parts[threadIdx.x], parts[threadIdx.x + half]);
  }
  __syncthreads();
  return parts[0];
}

template <typename Value>
__device__ float largest_over(int64_t count, Value value) {
  float most = -INFINITY;
  const auto larger = [](float a, float b) { return isnan(a) || a > b ? a : b; };  // NaN if any is; fmaxf drops NaN
  for (int64_t i = threadIdx.x; i < count; i += kThreads) most = larger(value(i), most);
  return over_block(most, larger);
}

template <typename Weight>
__device__ Word sum_over(int64_t count, Weight weight) {
  Word sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += weight(i);
  return over_block(sum, [](Word a, Word b) { return a + b; });
}

struct Place {
  Word key;
  Word reach;  // the weight of it and all larger keys
};

// The largest key for which the weight of it and all larger keys is at least `target`; radix select over `bits` bits.
template <typename Key, typename Weight>
__device__ Place find(int64_t count, int bits, Word target, Key key, Weight weight) {
  __shared__ Word weights[kDigits];
  __shared__ Word chosen[2];
  Word prefix = 0, before = 0;
  for (int shift = bits - kDigitBits; shift >= 0; shift -= kDigitBits) {
    for (int i = threadIdx.x; i < kDigits; i += kThreads) weights[i] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < count; i += kThreads) {
      const Word k = key(i);
      if (k >> shift >> kDigitBits != prefix >> shift >> kDigitBits) continue;
      const Word w = weight(i);
      if (w > 0) atomicAdd(&weights[k >> shift & (kDigits - 1)], w);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = kDigits - 1;
      for (; digit > 0 && before + weights[digit] < target; --digit) before += weights[digit];
      chosen[0] = digit;
      chosen[1] = before;
    }
    __syncthreads();
    prefix |= chosen[0] << shift;
    before = chosen[1];
  }
  const Place place = {prefix, before + weights[prefix & (kDigits - 1)]};
  __syncthreads();  // before the next search clears the weights
  return place;
}

struct Pick {
  Word key;  // its lower half is 2^32 - 1 - id
  float log_mass;
};

__device__ Pick draw(const Row& row, float largest, double u) {
  const Options& options = *row.options;
  const int64_t vocab = options.vocab;
  const auto key = [&](int64_t i) { return key_of(row.allowed(i), i); };
  const auto weight = [&](int64_t i) { return weight_of(row.allowed(i), largest); };
  const auto share = [](double part, Word mass) { return min(mass, static_cast<Word>(part * mass)); };
  if (options.top_k == 0 && options.top_p >= 1.0) {
    const Word mass = sum_over(vocab, weight);
    const auto by_id = [](int64_t i) { return static_cast<Word>(0xffffffffu - static_cast<unsigned>(i)); };
    const Place place = find(vocab, 32, min(mass, share(u, mass) + 1), by_id, weight);
    return {place.key, log_mass(largest, mass)};
  }
  Word floor = 0;
  if (options.top_k > 0) floor = find(vocab, 64, options.top_k, key, [](int64_t) { return Word{1}; }).key;
  const auto kept = [&](int64_t i) { return key(i) >= floor ? weight(i) : 0; };
  Word mass = sum_over(vocab, kept);
  if (options.top_p < 1.0) {
    const auto target = static_cast<Word>(ceil(options.top_p * static_cast<double>(mass)));
    const Place last = find(vocab, 64, max(Word{1}, min(mass, target)), key, kept);
    floor = last.key;
    mass = last.reach;
  }
  return {find(vocab, 64, min(mass, share(u, mass) + 1), key, kept).key, log_mass(largest, mass)};
}

__global__ void sample_rows(const float* logits, const double* u, Options options, int64_t* tokens, float* logprobs,
                            float* sampling_logprobs) {
  const int64_t at = blockIdx.x, vocab = options.vocab;
  const bool restricted = options.n_forbidden > 0 && (options.forbid_rows == nullptr || options.forbid_rows[at]);
  const Row row = {logits + at * vocab, &options, restricted};
  const float largest = largest_over(vocab, [&](int64_t i) { return row.allowed(i); });
  const float largest_of_all = restricted ? largest_over(vocab, [&](int64_t i) { return row.scaled(i); }) : largest;
  if (!isfinite(largest) || !isfinite(largest_of_all)) {  // for all threads of the block
    if (threadIdx.x == 0) tokens[at] = kNoToken, logprobs[at] = sampling_logprobs[at] = NAN;
    return;
  }
  const Word all = sum_over(vocab, [&](int64_t i) { return weight_of(row.scaled(i), largest_of_all); });
  Pick pick = {0, 0.0f};
  if (options.temperature == 0.0f) {
    Word best = 0;
    for (int64_t i = threadIdx.x; i < vocab; i += kThreads) best = max(best, key_of(row.allowed(i), i));
    pick.key = over_block(best, [](Word a, Word b) { return max(a, b); });
  } else {
    pick = draw(row, largest, u[at]);
  }
  if (threadIdx.x == 0) {
    const int64_t id = static_cast<int64_t>(0xffffffffu - static_cast<unsigned>(pick.key));
    tokens[at] = id;
    logprobs[at] = row.scaled(id) - log_mass(largest_of_all, all);
    sampling_logprobs[at] = options.temperature == 0.0f ? 0.0f : row.scaled(id) - pick.log_mass;
  }
}

__global__ void hash_counters(uint64_t seed, const int64_t* prompts, const int64_t* samples, const int64_t* positions,
                              int64_t count, double* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) out[i] = uniform_of(seed, prompts[i], samples[i], positions[i]);
}

std::tuple<Tensor, Tensor, Tensor> sample_tokens_cuda(const Tensor& logits, const Tensor& u,
                                                      const std::optional<Tensor>& forbid,
                                                      const std::optional<Tensor>& forbid_rows, double temperature,
                                                      int64_t top_k, double top_p) {
  const Drawing drawing = checked_drawing(logits, u, forbid, forbid_rows, temperature, top_k, top_p);
  Drawn drawn = empty_drawn(drawing);
  if (drawing.n_rows > 0) {
    const Launch on(drawing.logits);
    const Options options = {drawing.forbidden(), drawing.n_forbidden(), drawing.rows(), drawing.temperature,
                             drawing.top_k,       drawing.top_p,         drawing.vocab};
    sample_rows<<<static_cast<unsigned>(drawing.n_rows), kThreads, 0, on.stream()>>>(
        drawing.logits.const_data_ptr<float>(), drawing.u.const_data_ptr<double>(), options,
        drawn.tokens.mutable_data_ptr<int64_t>(), drawn.logprobs.mutable_data_ptr<float>(),
        drawn.sampling_logprobs.mutable_data_ptr<float>());
    on.check("sample_tokens");
  }
  return {drawn.tokens, drawn.logprobs, drawn.sampling_logprobs};
}

Tensor counter_uniform_cuda(int64_t seed, const Tensor& prompts, const Tensor& samples, const Tensor& positions) {
  const Counters counters = checked_counters(prompts, samples, positions);
  const int64_t count = prompts.numel();
  Tensor result = torch::stable::new_empty(prompts, {count}, ScalarType::Double);
  if (count > 0) {
    const Launch on(prompts);
    hash_counters<<<blocks_for(count, kThreads), kThreads, 0, on.stream()>>>(
        seed, counters.prompts.const_data_ptr<int64_t>(), counters.samples.const_data_ptr<int64_t>(),
        counters.positions.const_data_ptr<int64_t>(), count, result.mutable_data_ptr<double>());
    on.check("counter_uniform");
  }
  return result;
}

}  // namespace
}  // namespace realhf

STABLE_TORCH_LIBRARY_IMPL(realhf, CUDA, library) {
  library.impl("sample_tokens", TORCH_BOX(&realhf::sample_tokens_cuda));
  library.impl("counter_uniform", TORCH_BOX(&realhf::counter_uniform_cuda));
}

// Token sampling: CUDA kernels, one thread block per row. realhf/ops/sampling.py documents the operators, sampling.cpp
// has the schemas. Weights are integers, so sums do not depend on the order of threads; boundaries are found by radix
// select, without sorting. There are no atomics: logits of one row fall into few bins, where atomics would be serial.
#include <cmath>
#include <tuple>

#include "block_reduce.h"
#include "sampling.h"

namespace realhf {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocksPerProcessor = 2;  // of its registers: for more blocks, nvcc spills some
constexpr int kDigits = 256;
constexpr int kDigitBits = 8;
constexpr float kUnit = 0x1p40f;                // weight of the most likely token
constexpr int64_t kMaxVocab = int64_t{1} << 23;  // a sum of their weights fits into 64 bits

using Word = unsigned long long;  // 64 bits, with overloads of min, max and shuffles

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

__device__ int64_t id_of(Word key) { return static_cast<int64_t>(0xffffffffu - static_cast<unsigned>(key)); }

struct Plus {
  __device__ Word operator()(Word a, Word b) const { return a + b; }
};

__device__ Word weight_of(float x, float largest) { return __float2ull_rn(expf(x - largest) * kUnit); }

__device__ float log_mass(float largest, Word mass) {
  return static_cast<float>(largest + log(static_cast<double>(mass) / kUnit));
}

template <typename Value>
__device__ float largest_over(int64_t count, Value value) {
  float most = -INFINITY;
  const auto larger = [](float a, float b) { return isnan(a) || a > b ? a : b; };  // NaN if any is; fmaxf drops NaN
  for (int64_t i = threadIdx.x; i < count; i += kThreads) most = larger(value(i), most);
  return over_block<kThreads>(most, larger);
}

template <typename Weight>
__device__ Word sum_over(int64_t count, Weight weight) {
  Word sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) sum += weight(i);
  return over_block<kThreads>(sum, Plus());
}

// The first id at which the running sum of weights reaches `target`, which is at most the sum of all. Each warp sums
// one part of the range; the part in which the sum passes the target is the next range.
template <typename Weight>
__device__ int64_t first_reaching(int64_t count, Word target, Weight weight) {
  __shared__ Word sums[kWarps];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  int64_t first = 0, stop = count;
  Word before = 0;
  while (stop - first > 1) {
    const int64_t size = (stop - first + kWarps - 1) / kWarps;
    const int64_t begin = first + warp * size, end = min(begin + size, stop);
    Word sum = 0;
    for (int64_t i = begin + lane; i < end; i += kWarp) sum += weight(i);
    sum = over_warp(sum, Plus());
    __syncthreads();  // wait for readers of the previous sums
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    int part = 0;
    for (; part < kWarps - 1 && before + sums[part] < target; ++part) before += sums[part];
    first += part * size;
    stop = min(first + size, stop);
  }
  return first;
}

// One histogram of digits per warp, the same memory for all searches.
__device__ Word& histogram(int warp, int digit) {
  __shared__ Word sums[kWarps * kDigits];
  return sums[warp * kDigits + digit];
}

// Adds the weights of a warp to its histogram without atomics: the first of the lanes with one digit adds their sum.
// All lanes call it; lanes without a weight pass 0. Pairs of lanes are summed in parallel, at most 5 times.
__device__ void add_to_histogram(int digit, Word weight) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  unsigned peers = __ballot_sync(kWholeWarp, weight > 0);
  if (peers == 0) return;
  for (int bit = 0; bit < kDigitBits; ++bit) {
    const unsigned set = __ballot_sync(kWholeWarp, digit >> bit & 1);
    peers &= digit >> bit & 1 ? set : ~set;
  }
  if (weight == 0) peers = 0;
  const bool is_first = __ffs(peers) - 1 == lane;
  unsigned later = peers & ~1u << lane;
  int rank = __popc(peers & ~(~0u << lane));
  while (__any_sync(kWholeWarp, later != 0)) {
    const Word other = __shfl_sync(kWholeWarp, weight, later != 0 ? __ffs(later) - 1 : lane);
    if (later != 0) weight += other;
    later &= __ballot_sync(kWholeWarp, rank % 2 == 0);  // the others have been added to the lane before them
    rank /= 2;
  }
  if (is_first) histogram(warp, digit) += weight;
  __syncwarp();  // before another lane adds to the same digit
}

struct Digit {
  int value;
  Word before, reach;  // weight of larger digits; with its own
};

// The digit at which `before` and the weights of the digits from the largest one reach `target`. A warp calls it; it
// returns true to the one lane that has the result.
__device__ bool choose_digit(Word before, Word target, Digit& chosen) {
  constexpr int kPerLane = kDigits / kWarp;
  const int lane = threadIdx.x % kWarp, top = kDigits - 1 - lane * kPerLane;
  Word own = 0;
  for (int i = 0; i < kPerLane; ++i) own += histogram(0, top - i);
  Word sum = own;
  for (int span = 1; span < kWarp; span *= 2) {
    const Word earlier = __shfl_up_sync(kWholeWarp, sum, span);
    if (lane >= span) sum += earlier;
  }
  const unsigned reaching = __ballot_sync(kWholeWarp, before + sum >= target);
  if (lane != (reaching == 0 ? kWarp : __ffs(reaching)) - 1) return false;
  chosen = {top, before + sum - own, 0};
  for (int i = 1; i < kPerLane && chosen.before + histogram(0, chosen.value) < target; ++i) {
    chosen.before += histogram(0, chosen.value--);
  }
  chosen.reach = chosen.before + histogram(0, chosen.value);
  return true;
}

struct Place {
  Word key;
  Word reach;  // weight of the key and all larger keys
};

// The largest key for which the weight of it and all larger keys is at least `target`; radix select.
template <typename Key, typename Weight>
__device__ Place find(int64_t count, Word target, Key key, Weight weight) {
  __shared__ Digit chosen[1];
  const int at = threadIdx.x;
  Word prefix = 0, before = 0;
  for (int shift = 64 - kDigitBits; shift >= 0; shift -= kDigitBits) {
    for (int i = at; i < kWarps * kDigits; i += kThreads) histogram(0, i) = 0;
    __syncthreads();
    for (int64_t first = 0; first < count; first += kThreads) {  // all lanes of a warp together
      const int64_t i = first + at;
      const Word k = i < count ? key(i) : 0;
      const bool is_candidate = i < count && k >> shift >> kDigitBits == prefix >> shift >> kDigitBits;
      add_to_histogram(k >> shift & (kDigits - 1), is_candidate ? weight(i) : 0);
    }
    __syncthreads();
    for (int warp = 1; at < kDigits && warp < kWarps; ++warp) histogram(0, at) += histogram(warp, at);
    __syncthreads();
    Digit digit;
    if (at < kWarp && choose_digit(before, target, digit)) chosen[0] = digit;
    __syncthreads();
    prefix |= static_cast<Word>(chosen[0].value) << shift;
    before = chosen[0].before;
  }
  return {prefix, chosen[0].reach};
}

struct Pick {
  int64_t id;
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
    return {first_reaching(vocab, min(mass, share(u, mass) + 1), weight), log_mass(largest, mass)};
  }
  Word floor = 0;
  if (options.top_k > 0) floor = find(vocab, options.top_k, key, [](int64_t) { return Word{1}; }).key;
  const auto kept = [&](int64_t i) { return key(i) >= floor ? weight(i) : 0; };
  Word mass = sum_over(vocab, kept);
  if (options.top_p < 1.0) {
    const auto target = static_cast<Word>(ceil(options.top_p * static_cast<double>(mass)));
    const Place last = find(vocab, max(Word{1}, min(mass, target)), key, kept);
    floor = last.key;
    mass = last.reach;
  }
  return {id_of(find(vocab, min(mass, share(u, mass) + 1), key, kept).key), log_mass(largest, mass)};
}

__global__ void __launch_bounds__(kThreads, kBlocksPerProcessor)
    sample_rows(const float* logits, const double* u, Options options, int64_t* tokens, float* logprobs,
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
    pick.id = id_of(over_block<kThreads>(best, [](Word a, Word b) { return max(a, b); }));
  } else {
    pick = draw(row, largest, u[at]);
  }
  if (threadIdx.x == 0) {
    tokens[at] = pick.id;
    logprobs[at] = row.scaled(pick.id) - log_mass(largest_of_all, all);
    sampling_logprobs[at] = options.temperature == 0.0f ? 0.0f : row.scaled(pick.id) - pick.log_mass;
  }
}

__global__ void __launch_bounds__(kThreads)
    hash_counters(uint64_t seed, const int64_t* prompts, const int64_t* samples, const int64_t* positions,
                  int64_t count, double* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) out[i] = uniform_of(seed, prompts[i], samples[i], positions[i]);
}

std::tuple<Tensor, Tensor, Tensor> sample_tokens_cuda(const Tensor& logits, const Tensor& u,
                                                      const std::optional<Tensor>& forbid,
                                                      const std::optional<Tensor>& forbid_rows, double temperature,
                                                      int64_t top_k, double top_p) {
  const Drawing drawing = checked_drawing(logits, u, forbid, forbid_rows, temperature, top_k, top_p);
  STD_TORCH_CHECK(drawing.vocab <= kMaxVocab, "sample_tokens: at most ", kMaxVocab, " tokens on CUDA, got ",
                  drawing.vocab);
  Drawn drawn = empty_drawn(drawing);
  if (drawing.n_rows > 0) {
    const Launch on(drawing.logits);
    const Options options = {drawing.forbidden(), drawing.n_forbidden(), drawing.rows(), drawing.temperature,
                             drawing.top_k,       drawing.top_p,         drawing.vocab};
    sample_rows<<<blocks_for(drawing.n_rows, 1), kThreads, 0, on.stream()>>>(
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

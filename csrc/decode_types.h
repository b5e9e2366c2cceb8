// What a decoding step computes with: the sizes and weights of a stage, and the buffers of a thread. Included once, inside
// the namespace of decode.cpp.

constexpr int64_t kRowsAtOnce = 128;       // rows per pass over the weights
constexpr int64_t kMinRowsPerThread = 12;  // fewer rows do not repay reading all weights
constexpr int64_t kMinPartElements = 1 << 17;  // of a layer's weights per thread of a team: a product waits for all
constexpr int64_t kCacheBytes = 1 << 26;       // weights of a stage that stay in caches
constexpr int64_t kRowsPerGroup = 16;      // rows that attend to a shared prefix together
constexpr int64_t kMaxSize = 1 << 20;      // of given sizes, whose products must not overflow
constexpr float kLowest = -std::numeric_limits<float>::max();
constexpr float kSmallest = 1e-20f;        // added to sums of sigmoid scores, as in realhf/ops/moe.py

// The tensors of a layer: of attention, of an MLP, and what routed experts have beside them.
constexpr int64_t kOfAttention = 10, kOfMlp = 7, kOfRouter = 6;

constexpr int64_t padded(int64_t count) { return (count + kPadding - 1) / kPadding * kPadding; }

// Which sublayers of its blocks a call computes. One alone is that of a single block; its result is the product that is
// added to the hidden states, without bias, norm and scale.
enum class Sublayers : int64_t { both, attention, mlp };

// How a token chooses `top_k` of `count` experts (RoutingRule of realhf/ops/moe.py); this worker has `n_own` of them,
// from `first` on.
struct Routing {
  int64_t count, first, n_own, top_k, n_groups, n_used;
  bool is_sigmoid, renormalises;
  int64_t inner, shared_inner;
  float scale;
};

struct Shape {
  int64_t hidden, n_q, n_kv, dim, inner, max_len, growth_period;
  Activation activation;
  Sublayers sublayers;
  bool gated, parallel, layer_norms, has_gates, norms_projections, has_bf16_cache;
  float eps, residual_scale, scale, softcap, query_growth;
  Routing routing;

  int64_t place(int64_t row, int64_t head, int64_t position) const {
    return ((row * n_kv + head) * max_len + position) * dim;
  }
  int64_t of_qkv() const { return (n_q * (has_gates ? 2 : 1) + 2 * n_kv) * dim; }
  int64_t across(int64_t width) const { return gated ? 2 * width : width; }
};

template <typename scalar_t>
struct Norm {
  const scalar_t *weight, *bias;
  float offset;
  bool is_layer_norm;
};

// The MLPs of the experts are consecutive in `up` and `down`.
template <typename scalar_t>
struct Router {
  Matrix<scalar_t> product, shared_up, shared_down;
  const scalar_t *choice_bias, *shared_gate;
};

template <typename scalar_t>
struct Layer {
  Norm<scalar_t> norm, q_norm, k_norm, post_norm, mlp_norm, mlp_post_norm;
  Matrix<scalar_t> qkv, out, up, down;
  const scalar_t* sinks;
  bool is_routed;
  Router<scalar_t> router;
  char *keys, *values;  // [rows, n_kv, max_len, dim] of the cache's type
  int64_t window;
  int64_t* chosen;  // [S, top_k], or null
  Rope rope;
};

template <typename scalar_t>
struct Stage {
  const Layer<scalar_t>* layers;
  int64_t n_layers;
  Norm<scalar_t> final_norm;
  const scalar_t* x;
  const int64_t *positions, *prefixes, *slots;
  scalar_t* result;
};

// The keys or values of a layer from `place` on.
template <typename cache_t>
__attribute__((always_inline)) inline cache_t* cached(char* store, int64_t place) {
  return reinterpret_cast<cache_t*>(store) + place;
}

// The cache row of a row; `slots` may be null.
__attribute__((always_inline)) inline int64_t slot_of(const int64_t* slots, int64_t row) { return slots ? slots[row] : row; }

// Rows whose first `shared` tokens are equal and cached in row `holder`; `longest` is the length of the longest row.
struct PrefixGroup {
  const int64_t* rows;
  int64_t n_rows, shared, longest, holder;
};

// Threads that compute the same rows: each takes a part of every product and of the heads.
struct Team {
  int64_t n_threads;
  void (*run)(int64_t count, void (*work)(void* given, int64_t part), void* given);  // all parts, at the same time
};

// What the attention of one head of a prefix group computes with.
struct HeadBuffers {
  float *scores, *queries, *heads, *sums;
};

// The buffers of some rows, which a team computes. Those of routed experts are in the order of pairs of a token and its expert.
struct Buffers {
  Team team;
  std::unique_ptr<HeadBuffers[]> of_threads;
  HeadBuffers* own;  // of_threads; the kernels call no functions of the standard library
  const PrefixGroup* groups;
  int64_t n_groups;
  float *x, *inner, *mixed, *product, *projected;
  float *logits, *shares, *picked, *outputs, *work;
  int64_t *chosen, *starts, *pairs;
  std::unique_ptr<float[]> memory;
  std::unique_ptr<int64_t[]> numbers;
  std::vector<int64_t> order;
  std::vector<PrefixGroup> prefix_groups;

  Buffers(const Shape& shape, int64_t rows, const Team& own_team)
      : team(own_team), of_threads(new HeadBuffers[own_team.n_threads]), own(of_threads.get()) {
    const Routing& routing = shape.routing;
    const int64_t of_mixed = shape.n_q * shape.dim, widest = std::max({shape.inner, routing.inner, routing.shared_inner});
    const int64_t projected_size = std::max(shape.of_qkv(), shape.across(widest));
    const int64_t group_size = std::min(kRowsPerGroup, rows) * (shape.n_q / std::max<int64_t>(1, shape.n_kv));
    const int64_t expert_rows = routing.count > 0 ? rows : 0;
    memory = aligned_buffers([&](const auto& take) {
      for (float** part : {&x, &inner, &product}) *part = take(rows * shape.hidden);
      mixed = take(rows * of_mixed), projected = take(rows * projected_size);
      for (int64_t i = 0; i < team.n_threads; ++i) {
        HeadBuffers& own = of_threads[i];
        own.scores = take(group_size * padded(shape.max_len)), own.sums = take(group_size);
        for (float** part : {&own.queries, &own.heads}) *part = take(group_size * shape.dim);
      }
      logits = take(expert_rows * padded(routing.count)), shares = take(expert_rows * routing.top_k);
      work = take(2 * padded(routing.count));
      for (float** part : {&picked, &outputs}) *part = take(expert_rows * shape.hidden);
    });
    const int64_t n_pairs = expert_rows * routing.top_k;
    numbers.reset(new int64_t[2 * n_pairs + routing.count + 2]);
    chosen = numbers.get(), pairs = chosen + n_pairs, starts = pairs + n_pairs;
  }

  // Groups rows first..first+count by prefix; `prefixes` [3, S] are group numbers, shared lengths and holders.
  void find_groups(int64_t first, int64_t count, const int64_t* positions, const int64_t* prefixes, const int64_t* slots,
                   int64_t n_rows) {
    order.resize(count), prefix_groups.clear();
    std::iota(order.begin(), order.end(), first);
    if (prefixes) {
      std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return prefixes[a] < prefixes[b]; });
    }
    for (const int64_t& row : order) {
      const bool is_linked = prefixes && !prefix_groups.empty() && prefix_groups.back().n_rows < kRowsPerGroup &&
                             prefixes[prefix_groups.back().rows[0]] == prefixes[row];
      const int64_t shared = prefixes ? prefixes[n_rows + row] : 0;
      if (!is_linked) prefix_groups.push_back({&row, 0, shared, 0, prefixes ? prefixes[2 * n_rows + row] : slot_of(slots, row)});
      PrefixGroup& prefix_group = prefix_groups.back();
      prefix_group.shared = std::min(prefix_group.shared, shared),
      prefix_group.longest = std::max(prefix_group.longest, positions[row] + 1);
      ++prefix_group.n_rows;
    }
    groups = prefix_groups.data(), n_groups = prefix_groups.size();
  }
};

// The checked arguments of decode_blocks and decode_steps. Included once, inside the namespace of decode.cpp.

// Reads the tensors of a stage in order and checks their sizes; an empty tensor means none.
template <typename scalar_t>
class Reader {
 public:
  Reader(const std::vector<Tensor>& all, float offset, bool layer_norms)
      : next_(all.begin()), offset_(offset), layer_norms_(layer_norms) {}

  const scalar_t* take(int64_t size) {
    const Tensor& given = *next_++;
    if (given.numel() == 0) return nullptr;
    STD_TORCH_CHECK(tile_type(given) == kType, "decode_blocks: weights other than matrices must be typed as x");
    return static_cast<const scalar_t*>(checked(given, size));
  }

  Norm<scalar_t> norm(int64_t size) {  // over hidden states
    const scalar_t *weight = take(size), *bias = take(size);
    return {weight, bias, offset_, layer_norms_};
  }

  Norm<scalar_t> rms_norm(int64_t size) { return {take(size), nullptr, offset_, false}; }

  // `count` matrices of the same size, and their biases; null if they may be missing.
  Matrix<scalar_t> matrix(int64_t outs, int64_t depth, bool has_bias = true, int64_t count = 1, bool needed = true) {
    const Tensor& given = *next_++;
    Matrix<scalar_t> result{nullptr, tile_type(given), nullptr, padded(outs), depth};
    STD_TORCH_CHECK(given.numel() > 0 || !needed, "decode_blocks: a matrix is missing");
    if (given.numel() > 0) {
      const int64_t itemsize = result.type == TileType::float32 ? 4 : result.type == TileType::bfloat16 ? 2 : 1;
      const int64_t size = count * padded(outs) / kPadding * (result.tile_bytes() / itemsize);
      result.tiles = static_cast<const char*>(checked(given, size));
    }
    if (has_bias) result.bias = take(count * padded(outs));
    return result;
  }

 private:
  static constexpr TileType kType = sizeof(scalar_t) == 4 ? TileType::float32 : TileType::bfloat16;

  static TileType tile_type(const Tensor& given) {
    switch (given.scalar_type()) {
      case ScalarType::Float:
        return TileType::float32;
      case ScalarType::BFloat16:
        return TileType::bfloat16;
      default:
        STD_TORCH_CHECK(given.scalar_type() == ScalarType::Char,
                        "decode_blocks: weights must be float32, bfloat16 or int8");
        return TileType::int8;
    }
  }

  static const void* checked(const Tensor& given, int64_t size) {
    STD_TORCH_CHECK(given.numel() == size && given.is_contiguous(), "decode_blocks: a weight of ", given.numel(),
                    " elements where ", size, " are expected, contiguous");
    return given.const_data_ptr();
  }

  std::vector<Tensor>::const_iterator next_;
  float offset_;
  bool layer_norms_;
};

template <typename scalar_t>
void read_attention(Reader<scalar_t>& reader, const Shape& shape, Layer<scalar_t>& layer) {
  const int64_t hidden = shape.hidden, of_q = shape.n_q * shape.dim, of_k = shape.n_kv * shape.dim;
  layer.norm = reader.norm(hidden);
  layer.qkv = reader.matrix(shape.of_qkv(), hidden);
  layer.q_norm = reader.rms_norm(shape.norms_projections ? of_q : shape.dim);
  layer.k_norm = reader.rms_norm(shape.norms_projections ? of_k : shape.dim);
  layer.out = reader.matrix(hidden, of_q);
  layer.post_norm = reader.rms_norm(hidden);
  layer.sinks = reader.take(shape.n_q);
}

template <typename scalar_t>
void read_mlp(Reader<scalar_t>& reader, const Shape& shape, Layer<scalar_t>& layer) {
  const Routing& routing = shape.routing;
  const int64_t hidden = shape.hidden, inner = layer.is_routed ? routing.inner : shape.inner;
  const int64_t count = layer.is_routed ? routing.n_own : 1;
  layer.mlp_norm = reader.norm(hidden);
  layer.up = reader.matrix(shape.across(inner), hidden, true, count, count > 0);
  layer.down = reader.matrix(hidden, inner, true, count, count > 0);
  layer.mlp_post_norm = reader.rms_norm(hidden);
  if (!layer.is_routed) return;
  Router<scalar_t>& router = layer.router;
  router.product = reader.matrix(routing.count, hidden);
  router.choice_bias = reader.take(routing.count);
  router.shared_up = reader.matrix(shape.across(routing.shared_inner), hidden, false, 1, false);
  router.shared_down = reader.matrix(hidden, routing.shared_inner, false, 1, routing.shared_inner > 0);
  router.shared_gate = reader.take(hidden);
}

// `all` are the positions of n_rows rows, below `limit`.
void check_rows(const int64_t* all, const std::optional<Tensor>& prefixes, int64_t n_rows, int64_t limit,
                bool has_windows) {
  STD_TORCH_CHECK(!prefixes || (prefixes->dim() == 2 && prefixes->size(0) == 3 && prefixes->size(1) == n_rows &&
                                prefixes->is_contiguous() && prefixes->scalar_type() == ScalarType::Long),
                  "decode_blocks: prefixes must be [3, ", n_rows, "] int64, contiguous");
  const int64_t* shared = prefixes ? prefixes->const_data_ptr<int64_t>() + n_rows : nullptr;
  for (int64_t i = 0; i < n_rows; ++i) {
    STD_TORCH_CHECK(all[i] >= 0 && all[i] < limit, "decode_blocks: position ", all[i], " of ", limit);
    STD_TORCH_CHECK(!shared || (shared[i] >= 0 && shared[i] <= all[i]), "decode_blocks: row ", i, " at position ",
                    all[i], " shares ", shared ? shared[i] : 0, " tokens");
    const int64_t holder = shared ? shared[n_rows + i] : i;
    STD_TORCH_CHECK(holder == i || (holder >= 0 && holder < n_rows && !has_windows), "decode_blocks: row ", i,
                    " cannot read what row ", holder, " holds");
  }
}

// Rows of a slot are consecutive, and so are their positions.
void check_slots(const Tensor& slots, const Tensor& positions, int64_t n_slots, bool has_prefixes) {
  const int64_t n_rows = positions.size(0);
  STD_TORCH_CHECK(slots.dim() == 1 && slots.size(0) == n_rows && slots.is_contiguous() &&
                      slots.scalar_type() == ScalarType::Long && !has_prefixes,
                  "decode_blocks: slots must be [", n_rows, "] int64, contiguous, without prefixes");
  const int64_t *own = slots.const_data_ptr<int64_t>(), *at = positions.const_data_ptr<int64_t>();
  std::vector<bool> is_known(n_slots);
  for (int64_t i = 0; i < n_rows; ++i) {
    STD_TORCH_CHECK(own[i] >= 0 && own[i] < n_slots, "decode_blocks: slot ", own[i], " of ", n_slots);
    const bool follows = i > 0 && own[i] == own[i - 1];
    STD_TORCH_CHECK(follows ? at[i] == at[i - 1] + 1 : !is_known[own[i]], "decode_blocks: row ", i, " of slot ", own[i],
                    " at position ", at[i], " does not follow the row before");
    is_known[own[i]] = true;
  }
}

void check_sizes(std::initializer_list<int64_t> sizes) {
  for (const int64_t size : sizes) {
    STD_TORCH_CHECK(size >= 0 && size <= kMaxSize && size % kPadding == 0, "decode_blocks: size ", size,
                    " is no multiple of ", kPadding, " up to ", kMaxSize);
  }
}

// Of [count, first, n_own, top_k, n_groups, n_used, is_sigmoid, renormalises, inner, shared_inner]; empty without experts.
Routing checked_routing(const std::vector<int64_t>& sizes, double scale) {
  if (sizes.empty()) return {};
  STD_TORCH_CHECK(sizes.size() == 10, "decode_blocks: ", sizes.size(), " numbers about routed experts");
  const Routing routing{sizes[0],      sizes[1],      sizes[2], sizes[3], sizes[4],
                        sizes[5],      sizes[6] != 0, sizes[7] != 0, sizes[8], sizes[9],
                        static_cast<float>(scale)};
  STD_TORCH_CHECK(routing.count > 0 && routing.count <= kMaxSize && routing.first >= 0 && routing.n_own >= 0 &&
                      routing.n_own <= routing.count && routing.first <= routing.count - routing.n_own,
                  "decode_blocks: experts ", routing.first, " + ", routing.n_own, " of ", routing.count);
  STD_TORCH_CHECK(routing.n_groups > 0 && routing.count % routing.n_groups == 0 && routing.n_used > 0 &&
                      routing.n_used <= routing.n_groups &&
                      (routing.n_used == routing.n_groups || routing.count > routing.n_groups),
                  "decode_blocks: ", routing.n_used, " of ", routing.n_groups, " groups of ", routing.count, " experts");
  STD_TORCH_CHECK(routing.top_k > 0 && routing.top_k <= routing.count / routing.n_groups * routing.n_used,
                  "decode_blocks: a token chooses ", routing.top_k, " of ", routing.count, " experts");
  check_sizes({routing.inner, routing.shared_inner});
  return routing;
}

Shape checked_shape(const Tensor& x, const Tensor& k, const Tensor& v, int64_t n_heads, int64_t inner, Sublayers sublayers) {
  STD_TORCH_CHECK(x.dim() == 2 && k.dim() == 5 && x.is_contiguous() && k.is_contiguous() && v.is_contiguous() &&
                      v.numel() == k.numel(),
                  "decode_blocks: x must be [S, D], k and v [L, slots, K, max_len, d], contiguous");
  const auto is_known = [](const Tensor& given) {
    return given.scalar_type() == ScalarType::Float || given.scalar_type() == ScalarType::BFloat16;
  };
  STD_TORCH_CHECK(is_known(x) && is_known(k) && k.scalar_type() == v.scalar_type(),
                  "decode_blocks: x, k and v must be float32 or bfloat16, k and v alike");
  Shape shape{};
  shape.has_bf16_cache = k.scalar_type() == ScalarType::BFloat16;
  shape.hidden = x.size(1), shape.inner = inner, shape.sublayers = sublayers;
  check_sizes({shape.hidden, inner});
  STD_TORCH_CHECK(shape.hidden > 0, "decode_blocks: x has no columns");
  if (sublayers == Sublayers::mlp) return shape;
  shape.n_q = n_heads, shape.n_kv = k.size(2), shape.max_len = k.size(3), shape.dim = k.size(4);
  STD_TORCH_CHECK(shape.n_kv > 0 && n_heads > 0 && n_heads <= kMaxSize && n_heads % shape.n_kv == 0, "decode_blocks: ",
                  n_heads, " heads over ", shape.n_kv);
  check_sizes({shape.dim});
  STD_TORCH_CHECK(shape.dim > 0, "decode_blocks: heads have no columns");
  return shape;
}

// The first position that a cache or a table of angles does not have.
int64_t limit_of(const Shape& shape, const std::vector<Rope>& ropes) {
  int64_t limit = shape.max_len;
  for (const Rope& rope : ropes) limit = rope.angles ? std::min(limit, rope.count) : limit;
  return limit;
}

bool has_windows(const std::vector<int64_t>& windows) {
  return std::any_of(windows.begin(), windows.end(), [](int64_t window) { return window > 0; });
}

// The rotation of every layer; `table_of` has the number of its table, or -1.
std::vector<Rope> ropes_of(const std::vector<Tensor>& angles, const std::vector<int64_t>& table_of, int64_t dim) {
  std::vector<Rope> ropes;
  for (const int64_t table : table_of) {
    STD_TORCH_CHECK(table >= -1 && table < static_cast<int64_t>(angles.size()), "decode_blocks: table ", table, " of ",
                    angles.size());
    ropes.push_back(table < 0 ? Rope{nullptr, 0, 0} : checked_rope(angles[table], dim));
  }
  return ropes;
}

// The experts of tokens, [routed layers, S, top_k] int64, or null.
int64_t* checked_chosen(std::optional<Tensor>& chosen, int64_t n_routed, int64_t n_rows, int64_t top_k) {
  if (!chosen) return nullptr;
  STD_TORCH_CHECK(chosen->dim() == 3 && chosen->size(0) == n_routed && chosen->size(1) == n_rows &&
                      chosen->size(2) == top_k && chosen->is_contiguous() && chosen->scalar_type() == ScalarType::Long,
                  "decode_blocks: chosen must be [", n_routed, ", ", n_rows, ", ", top_k, "] int64, contiguous");
  return chosen->mutable_data_ptr<int64_t>();
}

void check_layers(const std::vector<Tensor>& weights, const std::vector<int64_t>& windows,
                  const std::vector<int64_t>& routed, const std::vector<int64_t>& table_of, const Tensor& k,
                  const Shape& shape) {
  const int64_t n_layers = windows.size(), n_routed = std::count_if(routed.begin(), routed.end(), [](int64_t is) { return is != 0; });
  const bool is_one = shape.sublayers == Sublayers::both || n_layers == 1;
  int64_t expected = shape.sublayers == Sublayers::both ? 2 : 0;  // of the final norm
  if (shape.sublayers != Sublayers::mlp) expected += n_layers * kOfAttention;
  if (shape.sublayers != Sublayers::attention) expected += n_layers * kOfMlp + n_routed * kOfRouter;
  STD_TORCH_CHECK(is_one && (shape.sublayers == Sublayers::mlp || n_layers == k.size(0)) &&
                      static_cast<int64_t>(table_of.size()) == n_layers &&
                      static_cast<int64_t>(routed.size()) == n_layers &&
                      static_cast<int64_t>(weights.size()) == expected && (n_routed == 0 || shape.routing.count > 0),
                  "decode_blocks: ", weights.size(), " weights, ", n_layers, " windows and ", table_of.size(),
                  " tables of ", k.size(0), " layers");
}

// Attention of one prefix group and one key/value head; compiled for every instruction set by multi_isa.h.

// Copies heads of `count` tokens of a strided tensor to [count * n_heads, padded_dim] float32, times `scale`, padded
// with zeros.
template <typename scalar_t>
REALHF_NOINLINE void gather_rows(const scalar_t* from, int64_t token, int64_t count, int64_t head, int64_t n_heads,
                                 const Heads& heads, float scale, float* to) {
  const int64_t dim = heads.dim, padded_dim = heads.padded_dim;
  for (int64_t i = 0; i < count * n_heads; ++i) {
    const scalar_t* row = from + (n_heads == 1 ? i * token : i / n_heads * token + i % n_heads * head);
    int64_t c = 0;
    for (; c + kLanes <= dim; c += kLanes) store(to + i * padded_dim + c, load(row + c) * scale);
    for (; c < padded_dim; c += kLanes) store(to + i * padded_dim + c, load_upto(row + c, dim - c) * scale);
  }
}

// Transposes one head of `count` tokens to [padded_dim, across]; writes padded(count) columns.
template <typename scalar_t>
REALHF_NOINLINE void gather_transposed(const scalar_t* from, int64_t stride, int64_t count, const Heads& heads,
                                       int64_t across, float* to) {
  constexpr int kParts = kPadding / REALHF_WIDTH;
  for (int64_t i = 0; i < padded(count); i += REALHF_WIDTH) {
    for (int64_t c = 0; c < heads.padded_dim; c += kPadding) {
      Vec lines[kParts][REALHF_WIDTH];
      for (int64_t line = 0; line < REALHF_WIDTH; ++line) {
        const int64_t there = i + line < count ? heads.dim - c : 0;
        const scalar_t* row = from + (i + line) * stride + c;
        float lanes[kPadding];
        for (int64_t at = 0; at < kPadding; at += kLanes) store(lanes + at, load_upto(row + at, there - at));
        for (int part = 0; part < kParts; ++part) lines[part][line] = load_vec(lanes + part * REALHF_WIDTH);
      }
      for (int part = 0; part < kParts; ++part) {
        transpose(lines[part]);
        float* const at = to + (c + part * REALHF_WIDTH) * across + i;
        for (int64_t line = 0; line < REALHF_WIDTH; ++line) {
          __builtin_memcpy(at + line * across, &lines[part][line], sizeof(Vec));
        }
      }
    }
  }
}

template <typename scalar_t>
REALHF_NOINLINE void scatter_row(scalar_t* to, const float* from, const Heads& heads, float scale) {
  int64_t c = 0;
  for (; c + kLanes <= heads.dim; c += kLanes) store(to + c, load(from + c) * scale);
  if (c < heads.dim) store_upto(to + c, load(from + c) * scale, heads.dim - c);
}

// Rotates heads of consecutive tokens, `group_size` heads per token; the first token is at `position`.
REALHF_INLINE void rotate_rows(const Rope& rope, int64_t count, int64_t group_size, int64_t position, float sign,
                               int64_t padded_dim, float* rows) {
  for (int64_t i = 0; i < (rope.rotary_dim > 0 ? count : 0); ++i) {
    rotate(rope, position + i / group_size, sign, rows + i * padded_dim);
  }
}

// Copies a segment's keys and values behind those of its prefix.
template <typename scalar_t>
REALHF_INLINE void gather_keys(const Call<scalar_t>& call, const Segment& segment, int64_t kv_head, bool backward,
                               Keys& keys) {
  const Inputs<scalar_t>& in = call.in;
  const Heads& heads = call.heads;
  const scalar_t* k = in.k + segment.start * in.k_token + kv_head * in.k_head;
  const scalar_t* v = in.v + segment.start * in.v_token + kv_head * in.v_head;
  const int64_t at = segment.first, row = at * heads.padded_dim;
  keys.count = at + segment.length;
  gather_rows(k, in.k_token, segment.length, 0, 1, heads, 1.0f, keys.k + row);
  rotate_rows(call.rope, segment.length, 1, segment.first, 1.0f, heads.padded_dim, keys.k + row);
  const Heads whole{1, 1, 1, heads.padded_dim, heads.padded_dim};
  gather_transposed(keys.k + row, heads.padded_dim, segment.length, whole, keys.across, keys.k_transposed + at);
  if (!backward) {
    gather_rows(v, in.v_token, segment.length, 0, 1, heads, 1.0f, keys.v + row);
    return;
  }
  gather_transposed(v, in.v_token, segment.length, heads, keys.across, keys.v_transposed + at);
  __builtin_memset(keys.k_grad + row, 0, sizeof(float) * segment.length * heads.padded_dim);
  __builtin_memset(keys.v_grad + row, 0, sizeof(float) * segment.length * heads.padded_dim);
}

// The range of `count` keys, starting at position `first`, that the queries at positions from..to can see.
struct Seen {
  int64_t lo, hi;
};
REALHF_INLINE Seen seen_by(int64_t from, int64_t to, int64_t first, int64_t count, int64_t window) {
  return {window > 0 ? max_of(0, from - window + 1 - first) : 0, min_of(count, to - first + 1)};
}

// Online softmax: replaces scores by e^(score - running maximum) and rescales the previous sum and output.
REALHF_NOINLINE void online_softmax_row(float* scores, int64_t across, Seen tile, Seen row, const Rule& rule,
                                        float* largest, float* sum, float* out, int64_t padded_dim) {
  const int64_t from = tile.lo / kPadding * kPadding;
  Floats most = Floats{} + *largest;
  for (int64_t j = from; j < across; j += kLanes) {
    Floats some = load(scores + j);
    if (rule.softcap > 0) some = tanh_of(some * (1.0f / rule.softcap)) * rule.softcap;
    if (j + kLanes > row.hi || j < row.lo) some = mask_outside(some, j, row.lo, row.hi, -kInfinity);
    store(scores + j, some);
    most = larger(some, most);
  }
  const float now = horizontal_max(most);
  Floats sums = {};
  const float shift = now == -kInfinity ? 0.0f : now;
  for (int64_t j = from; j < across; j += kLanes) {
    const Floats share = exp_of(load(scores + j) - shift);
    store(scores + j, share);
    sums += share;
  }
  if (now > *largest && *sum > 0.0f) {
    const float shrink = exp_of(Floats{} + (*largest - now))[0];
    *sum *= shrink;
    for (int64_t c = 0; c < padded_dim; c += kLanes) store(out + c, load(out + c) * shrink);
  }
  *sum += horizontal_sum(sums);
  *largest = now;
}

REALHF_NOINLINE void attend_forward(const Heads& heads, const Rule& rule, const Block& block, const Keys& keys,
                                    Scratch& scratch) {
  const int64_t padded_dim = heads.padded_dim;
  for (int64_t at = 0; at < keys.count; at += kKeysForward) {
    const int64_t count = min_of(kKeysForward, keys.count - at), first = at;
    for (int64_t r = 0; r < block.rows; r += kMaxRows) {
      const int64_t rows = min_of(kMaxRows, block.rows - r);
      const Seen tile = seen_by(block.position(r), block.position(r + rows - 1), first, count, rule.window);
      if (tile.hi <= tile.lo) continue;
      const int64_t from = tile.lo / kPadding * kPadding, to = padded(tile.hi);
      gemm(rows, to - from, padded_dim, scratch.q + r * padded_dim, padded_dim, 1, keys.k_transposed + at + from,
           keys.across, scratch.shares + from, kKeysForward, false);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t position = block.position(r + i);
        const Seen row = seen_by(position, position, first, count, rule.window);
        online_softmax_row(scratch.shares + i * kKeysForward, to, tile, row, rule, scratch.largest + r + i,
                           scratch.sums + r + i, scratch.out + (r + i) * padded_dim, padded_dim);
      }
      gemm(rows, padded_dim, tile.hi - from, scratch.shares + from, kKeysForward, 1, keys.v + (at + from) * padded_dim,
           padded_dim, scratch.out + r * padded_dim, padded_dim, true);
    }
  }
}

template <typename scalar_t>
REALHF_INLINE void segment_forward(const Call<scalar_t>& call, const Segment& segment, int64_t kv_head,
                                   const Keys& keys, Scratch& scratch) {
  const Inputs<scalar_t>& in = call.in;
  const Heads& heads = call.heads;
  const Outputs<scalar_t>& result = call.outputs;
  const int64_t at_once = max_of(1, kRowsAtOnce / heads.group_size), padded_dim = heads.padded_dim;
  for (int64_t p = 0; p < segment.length; p += at_once) {
    const int64_t n = min_of(at_once, segment.length - p), token = segment.start + p, head = kv_head * heads.group_size;
    const Block block{n * heads.group_size, segment.first + p, heads.group_size};
    gather_rows(in.q + token * in.q_token + head * in.q_head, in.q_token, n, in.q_head, heads.group_size, heads,
                call.rule.scale, scratch.q);
    rotate_rows(call.rope, block.rows, heads.group_size, block.first, 1.0f, padded_dim, scratch.q);
    for (int64_t r = 0; r < block.rows; ++r) scratch.largest[r] = -kInfinity, scratch.sums[r] = 0.0f;
    __builtin_memset(scratch.out, 0, sizeof(float) * block.rows * padded_dim);
    attend_forward(heads, call.rule, block, keys, scratch);
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t place = (token + r / heads.group_size) * heads.count + head + r % heads.group_size;
      scatter_row(result.out + place * heads.dim, scratch.out + r * padded_dim, heads, 1.0f / scratch.sums[r]);
      result.normalisers[place] = scratch.largest[r] + __builtin_logf(scratch.sums[r]);
    }
  }
}

// Probabilities and score gradients of a row of scores; zero for masked keys.
REALHF_NOINLINE void slopes_of(float* shares, float* slopes, int64_t across, Seen row, const Rule& rule,
                               float normaliser, float along) {
  for (int64_t j = 0; j < across; j += kLanes) {
    if (j >= row.hi || j + kLanes <= row.lo) {
      store(shares + j, Floats{});
      store(slopes + j, Floats{});
      continue;
    }
    Floats score = load(shares + j), steepness = Floats{} + 1.0f;
    if (rule.softcap > 0) {
      const Floats bent = tanh_of(score * (1.0f / rule.softcap));
      score = bent * rule.softcap, steepness = 1.0f - bent * bent;
    }
    Floats share = exp_of(score - normaliser), slope = share * (load(slopes + j) - along) * steepness;
    if (j + kLanes > row.hi || j < row.lo) {
      share = mask_outside(share, j, row.lo, row.hi, 0.0f);
      slope = mask_outside(slope, j, row.lo, row.hi, 0.0f);
    }
    store(shares + j, share);
    store(slopes + j, slope);
  }
}

REALHF_NOINLINE void attend_backward(const Heads& heads, const Rule& rule, const Block& block, const Keys& keys,
                                     Scratch& scratch) {
  const int64_t padded_dim = heads.padded_dim, across = keys.across, last = block.position(block.rows - 1);
  for (int64_t at = 0; at < keys.count; at += kKeysAtOnce) {
    const int64_t count = min_of(kKeysAtOnce, keys.count - at), first = at;
    const Seen all = seen_by(block.position(0), last, first, count, rule.window);
    if (all.hi <= all.lo) continue;
    for (int64_t r = 0; r < block.rows; r += kMaxRows) {
      const int64_t rows = min_of(kMaxRows, block.rows - r);
      const Seen tile = seen_by(block.position(r), block.position(r + rows - 1), first, count, rule.window);
      const int64_t from = tile.lo / kPadding * kPadding, to = padded(tile.hi), some = to - from;
      float *shares = scratch.shares + r * kKeysAtOnce, *slopes = scratch.slopes + r * kKeysAtOnce;
      if (tile.hi > tile.lo) {
        gemm(rows, some, padded_dim, scratch.q + r * padded_dim, padded_dim, 1, keys.k_transposed + at + from, across,
             shares + from, kKeysAtOnce, false);
        gemm(rows, some, padded_dim, scratch.grad + r * padded_dim, padded_dim, 1, keys.v_transposed + at + from,
             across, slopes + from, kKeysAtOnce, false);
      }
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t position = block.position(r + i);
        slopes_of(shares + i * kKeysAtOnce, slopes + i * kKeysAtOnce, padded(all.hi),
                  seen_by(position, position, first, count, rule.window), rule, scratch.largest[r + i],
                  scratch.sums[r + i]);
      }
      if (tile.hi > tile.lo) {
        gemm(rows, padded_dim, tile.hi - from, slopes + from, kKeysAtOnce, 1, keys.k + (at + from) * padded_dim,
             padded_dim, scratch.out + r * padded_dim, padded_dim, true);
      }
    }
    for (int64_t j = all.lo; j < all.hi; j += kMaxRows) {
      const int64_t some = min_of(kMaxRows, all.hi - j);
      const int64_t r = max_of(0, first + j - block.first) * heads.group_size;  // earlier rows see none of these keys
      int64_t stop = block.rows;
      if (rule.window > 0) {
        stop = min_of(stop, (first + j + some - 1 + rule.window - block.first) * heads.group_size);
      }
      if (stop <= r) continue;
      gemm(some, padded_dim, stop - r, scratch.slopes + r * kKeysAtOnce + j, 1, kKeysAtOnce, scratch.q + r * padded_dim,
           padded_dim, keys.k_grad + (at + j) * padded_dim, padded_dim, true);
      gemm(some, padded_dim, stop - r, scratch.shares + r * kKeysAtOnce + j, 1, kKeysAtOnce,
           scratch.grad + r * padded_dim, padded_dim, keys.v_grad + (at + j) * padded_dim, padded_dim, true);
    }
  }
}

template <typename scalar_t>
REALHF_INLINE void segment_backward(const Call<scalar_t>& call, const Segment& segment, int64_t kv_head,
                                    const Keys& keys, Scratch& scratch) {
  const Inputs<scalar_t>& in = call.in;
  const Heads& heads = call.heads;
  const Gradients<scalar_t>& result = call.gradients;
  const int64_t at_once = max_of(1, kRowsAtOnce / heads.group_size), padded_dim = heads.padded_dim;
  for (int64_t p = 0; p < segment.length; p += at_once) {
    const int64_t n = min_of(at_once, segment.length - p), token = segment.start + p, head = kv_head * heads.group_size;
    const Block block{n * heads.group_size, segment.first + p, heads.group_size};
    gather_rows(in.q + token * in.q_token + head * in.q_head, in.q_token, n, in.q_head, heads.group_size, heads,
                call.rule.scale, scratch.q);
    rotate_rows(call.rope, block.rows, heads.group_size, block.first, 1.0f, padded_dim, scratch.q);
    gather_rows(in.grad + token * in.grad_token + head * in.grad_head, in.grad_token, n, in.grad_head, heads.group_size,
                heads, 1.0f, scratch.grad);
    gather_rows(in.out + (token * heads.count + head) * heads.dim, heads.count * heads.dim, n, heads.dim,
                heads.group_size, heads, 1.0f, scratch.out);
    for (int64_t r = 0; r < block.rows; ++r) {
      const float *grad = scratch.grad + r * padded_dim, *out = scratch.out + r * padded_dim;
      Floats along = {};
      for (int64_t c = 0; c < padded_dim; c += kLanes) along += load(grad + c) * load(out + c);
      scratch.sums[r] = horizontal_sum(along);
      scratch.largest[r] = in.normalisers[(token + r / heads.group_size) * heads.count + head + r % heads.group_size];
    }
    __builtin_memset(scratch.out, 0, sizeof(float) * block.rows * padded_dim);
    attend_backward(heads, call.rule, block, keys, scratch);
    rotate_rows(call.rope, block.rows, heads.group_size, block.first, -1.0f, padded_dim, scratch.out);
    for (int64_t r = 0; r < block.rows; ++r) {
      scalar_t* const to =
          result.q + (token + r / heads.group_size) * result.token + (head + r % heads.group_size) * heads.dim;
      scatter_row(to, scratch.out + r * padded_dim, heads, call.rule.scale);
    }
  }
}

template <typename scalar_t>
REALHF_INLINE void scatter_keys(const Call<scalar_t>& call, const Segment& segment, int64_t kv_head, const Keys& keys) {
  const int64_t padded_dim = call.heads.padded_dim, row = segment.first * padded_dim;
  rotate_rows(call.rope, segment.length, 1, segment.first, -1.0f, padded_dim, keys.k_grad + row);
  for (int64_t i = 0; i < segment.length; ++i) {
    const int64_t place = (segment.start + i) * call.gradients.token + kv_head * call.heads.dim;
    scatter_row(call.gradients.k + place, keys.k_grad + row + i * padded_dim, call.heads, 1.0f);
    scatter_row(call.gradients.v + place, keys.v_grad + row + i * padded_dim, call.heads, 1.0f);
  }
}

template <typename scalar_t>
REALHF_INLINE void group_forward(const Call<scalar_t>& call, const PrefixGroup& prefix_group, int64_t kv_head,
                                 Scratch& scratch) {
  gather_keys(call, prefix_group.shared, kv_head, false, scratch.keys);
  segment_forward(call, prefix_group.shared, kv_head, scratch.keys, scratch);
  for (int64_t i = 0; i < prefix_group.n_suffixes; ++i) {
    gather_keys(call, prefix_group.suffixes[i], kv_head, false, scratch.keys);
    segment_forward(call, prefix_group.suffixes[i], kv_head, scratch.keys, scratch);
  }
}

template <typename scalar_t>
REALHF_INLINE void group_backward(const Call<scalar_t>& call, const PrefixGroup& prefix_group, int64_t kv_head,
                                  Scratch& scratch) {
  gather_keys(call, prefix_group.shared, kv_head, true, scratch.keys);
  segment_backward(call, prefix_group.shared, kv_head, scratch.keys, scratch);
  for (int64_t i = 0; i < prefix_group.n_suffixes; ++i) {
    gather_keys(call, prefix_group.suffixes[i], kv_head, true, scratch.keys);
    segment_backward(call, prefix_group.suffixes[i], kv_head, scratch.keys, scratch);
    scatter_keys(call, prefix_group.suffixes[i], kv_head, scratch.keys);
  }
  scatter_keys(call, prefix_group.shared, kv_head, scratch.keys);
}

void group_attention(const Call<float>& call, const PrefixGroup& prefix_group, int64_t kv_head, bool backward,
                     Scratch& scratch) {
  backward ? group_backward(call, prefix_group, kv_head, scratch) : group_forward(call, prefix_group, kv_head, scratch);
}

void group_attention(const Call<BFloat16>& call, const PrefixGroup& prefix_group, int64_t kv_head, bool backward,
                     Scratch& scratch) {
  backward ? group_backward(call, prefix_group, kv_head, scratch) : group_forward(call, prefix_group, kv_head, scratch);
}

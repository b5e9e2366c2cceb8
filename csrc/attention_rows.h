// Attention of one family of rows and one key/value head, for every width of registers: see each_width.h.

// Some heads of `count` tokens of a strided tensor become [count * n_heads, wide] float32, times `scale`; behind
// dim are zeros.
template <typename scalar_t>
REALHF_ONCE void gather_rows(const scalar_t* from, int64_t token, int64_t count, int64_t head, int64_t n_heads,
                             const Heads& heads, float scale, float* to) {
  const int64_t dim = heads.dim, wide = heads.wide;
  for (int64_t i = 0; i < count * n_heads; ++i) {
    const scalar_t* row = from + (n_heads == 1 ? i * token : i / n_heads * token + i % n_heads * head);
    int64_t c = 0;
    for (; c + kLanes <= dim; c += kLanes) store(to + i * wide + c, load(row + c) * scale);
    for (; c < wide; c += kLanes) store(to + i * wide + c, load_upto(row + c, dim - c) * scale);
  }
}

// One head of `count` tokens, turned: [wide, across], of which padded(count) are written.
template <typename scalar_t>
REALHF_ONCE void gather_turned(const scalar_t* from, int64_t stride, int64_t count, const Heads& heads, int64_t across,
                               float* to) {
  constexpr int kParts = kPadding / REALHF_WIDTH;
  for (int64_t i = 0; i < padded(count); i += REALHF_WIDTH) {
    for (int64_t c = 0; c < heads.wide; c += kPadding) {
      Wide lines[kParts][REALHF_WIDTH];
      for (int64_t line = 0; line < REALHF_WIDTH; ++line) {
        const int64_t there = i + line < count ? heads.dim - c : 0;
        const scalar_t* row = from + (i + line) * stride + c;
        float lanes[kPadding];
        for (int64_t at = 0; at < kPadding; at += kLanes) store(lanes + at, load_upto(row + at, there - at));
        for (int part = 0; part < kParts; ++part) lines[part][line] = load_wide(lanes + part * REALHF_WIDTH);
      }
      for (int part = 0; part < kParts; ++part) {
        turn(lines[part]);
        float* const at = to + (c + part * REALHF_WIDTH) * across + i;
        for (int64_t line = 0; line < REALHF_WIDTH; ++line) {
          __builtin_memcpy(at + line * across, &lines[part][line], sizeof(Wide));
        }
      }
    }
  }
}

template <typename scalar_t>
REALHF_ONCE void scatter_row(scalar_t* to, const float* from, const Heads& heads, float scale) {
  int64_t c = 0;
  for (; c + kLanes <= heads.dim; c += kLanes) store(to + c, load(from + c) * scale);
  if (c < heads.dim) store_upto(to + c, load(from + c) * scale, heads.dim - c);
}

// Heads of tokens that follow one another, `group` of them for each, the first at `position`.
REALHF_INLINE void rotate_rows(const Rotation& rotation, int64_t count, int64_t group, int64_t position, float sign,
                               int64_t wide, float* rows) {
  for (int64_t i = 0; i < (rotation.turning > 0 ? count : 0); ++i) {
    rotate(rotation, position + i / group, sign, rows + i * wide);
  }
}

// Puts a segment's keys and values at its positions, behind those of the segment that it continues.
template <typename scalar_t>
REALHF_INLINE void gather_keys(const Call<scalar_t>& call, const Segment& segment, int64_t kv_head, bool backward,
                               Keys& keys) {
  const Inputs<scalar_t>& in = call.in;
  const Heads& heads = call.heads;
  const scalar_t* k = in.k + segment.start * in.k_token + kv_head * in.k_head;
  const scalar_t* v = in.v + segment.start * in.v_token + kv_head * in.v_head;
  const int64_t at = segment.first, row = at * heads.wide;
  keys.count = at + segment.length;
  gather_rows(k, in.k_token, segment.length, 0, 1, heads, 1.0f, keys.k + row);
  rotate_rows(call.rotation, segment.length, 1, segment.first, 1.0f, heads.wide, keys.k + row);
  const Heads whole{1, 1, 1, heads.wide, heads.wide};
  gather_turned(keys.k + row, heads.wide, segment.length, whole, keys.across, keys.k_turned + at);
  if (!backward) {
    gather_rows(v, in.v_token, segment.length, 0, 1, heads, 1.0f, keys.v + row);
    return;
  }
  gather_turned(v, in.v_token, segment.length, heads, keys.across, keys.v_turned + at);
  __builtin_memset(keys.k_grad + row, 0, sizeof(float) * segment.length * heads.wide);
  __builtin_memset(keys.v_grad + row, 0, sizeof(float) * segment.length * heads.wide);
}

// Which of `count` keys, the first at position `first`, the queries at positions from..to see at all.
struct Seen {
  int64_t lo, hi;
};
REALHF_INLINE Seen seen_by(int64_t from, int64_t to, int64_t first, int64_t count, int64_t window) {
  return {window > 0 ? larger_of(0, from - window + 1 - first) : 0, smaller(count, to - first + 1)};
}

// A row of scores becomes e^(score - its largest so far); what was summed before is scaled to that.
REALHF_ONCE void soften(float* scores, int64_t across, Seen tile, Seen row, const Rule& rule, float* largest,
                          float* sum, float* out, int64_t wide) {
  const int64_t from = tile.lo / kPadding * kPadding;
  Floats most = Floats{} + *largest;
  for (int64_t j = from; j < across; j += kLanes) {
    Floats some = load(scores + j);
    if (rule.softcap > 0) some = hyperbolic_tangent(some * (1.0f / rule.softcap)) * rule.softcap;
    if (j + kLanes > row.hi || j < row.lo) some = within(some, j, row.lo, row.hi, -kInfinity);
    store(scores + j, some);
    most = larger(some, most);
  }
  const float now = most_of(most);
  Floats sums = {};
  const float shift = now == -kInfinity ? 0.0f : now;
  for (int64_t j = from; j < across; j += kLanes) {
    const Floats share = exponential(load(scores + j) - shift);
    store(scores + j, share);
    sums += share;
  }
  if (now > *largest && *sum > 0.0f) {
    const float shrink = exponential(Floats{} + (*largest - now))[0];
    *sum *= shrink;
    for (int64_t c = 0; c < wide; c += kLanes) store(out + c, load(out + c) * shrink);
  }
  *sum += total_of(sums);
  *largest = now;
}

// Let a block of queries see one range of keys.
REALHF_ONCE void attend_forward(const Heads& heads, const Rule& rule, const Block& block, const Keys& keys,
                                  Scratch& scratch) {
  const int64_t wide = heads.wide;
  for (int64_t at = 0; at < keys.count; at += kKeysForward) {
    const int64_t count = smaller(kKeysForward, keys.count - at), first = at;
    for (int64_t r = 0; r < block.rows; r += kTall) {
      const int64_t rows = smaller(kTall, block.rows - r);
      const Seen tile = seen_by(block.position(r), block.position(r + rows - 1), first, count, rule.window);
      if (tile.hi <= tile.lo) continue;
      const int64_t from = tile.lo / kPadding * kPadding, to = padded(tile.hi);
      product(rows, to - from, wide, scratch.q + r * wide, wide, 1, keys.k_turned + at + from, keys.across,
              scratch.shares + from, kKeysForward, false);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t position = block.position(r + i);
        const Seen row = seen_by(position, position, first, count, rule.window);
        soften(scratch.shares + i * kKeysForward, to, tile, row, rule, scratch.largest + r + i,
               scratch.sums + r + i, scratch.out + (r + i) * wide, wide);
      }
      product(rows, wide, tile.hi - from, scratch.shares + from, kKeysForward, 1, keys.v + (at + from) * wide, wide,
              scratch.out + r * wide, wide, true);
    }
  }
}

template <typename scalar_t>
REALHF_INLINE void segment_forward(const Call<scalar_t>& call, const Segment& segment, int64_t kv_head,
                                   const Keys& keys, Scratch& scratch) {
  const Inputs<scalar_t>& in = call.in;
  const Heads& heads = call.heads;
  const Outputs<scalar_t>& result = call.outputs;
  const int64_t at_once = larger_of(1, kRowsAtOnce / heads.group), wide = heads.wide;
  for (int64_t p = 0; p < segment.length; p += at_once) {
    const int64_t n = smaller(at_once, segment.length - p), token = segment.start + p, head = kv_head * heads.group;
    const Block block{n * heads.group, segment.first + p, heads.group};
    gather_rows(in.q + token * in.q_token + head * in.q_head, in.q_token, n, in.q_head, heads.group, heads,
                call.rule.scale, scratch.q);
    rotate_rows(call.rotation, block.rows, heads.group, block.first, 1.0f, wide, scratch.q);
    for (int64_t r = 0; r < block.rows; ++r) scratch.largest[r] = -kInfinity, scratch.sums[r] = 0.0f;
    __builtin_memset(scratch.out, 0, sizeof(float) * block.rows * wide);
    attend_forward(heads, call.rule, block, keys, scratch);
    for (int64_t r = 0; r < block.rows; ++r) {
      const int64_t place = (token + r / heads.group) * heads.count + head + r % heads.group;
      scatter_row(result.out + place * heads.dim, scratch.out + r * wide, heads, 1.0f / scratch.sums[r]);
      result.normalisers[place] = scratch.largest[r] + __builtin_logf(scratch.sums[r]);
    }
  }
}

// Shares and slopes of a row of scores, zeros where a query does not see.
REALHF_ONCE void slopes_of(float* shares, float* slopes, int64_t across, Seen row, const Rule& rule, float normaliser,
                             float along) {
  for (int64_t j = 0; j < across; j += kLanes) {
    if (j >= row.hi || j + kLanes <= row.lo) {
      store(shares + j, Floats{});
      store(slopes + j, Floats{});
      continue;
    }
    Floats score = load(shares + j), steepness = Floats{} + 1.0f;
    if (rule.softcap > 0) {
      const Floats bent = hyperbolic_tangent(score * (1.0f / rule.softcap));
      score = bent * rule.softcap, steepness = 1.0f - bent * bent;
    }
    Floats share = exponential(score - normaliser), slope = share * (load(slopes + j) - along) * steepness;
    if (j + kLanes > row.hi || j < row.lo) {
      share = within(share, j, row.lo, row.hi, 0.0f);
      slope = within(slope, j, row.lo, row.hi, 0.0f);
    }
    store(shares + j, share);
    store(slopes + j, slope);
  }
}

REALHF_ONCE void attend_backward(const Heads& heads, const Rule& rule, const Block& block, const Keys& keys,
                                   Scratch& scratch) {
  const int64_t wide = heads.wide, across = keys.across, last = block.position(block.rows - 1);
  for (int64_t at = 0; at < keys.count; at += kKeysAtOnce) {
    const int64_t count = smaller(kKeysAtOnce, keys.count - at), first = at;
    const Seen all = seen_by(block.position(0), last, first, count, rule.window);
    if (all.hi <= all.lo) continue;
    for (int64_t r = 0; r < block.rows; r += kTall) {
      const int64_t rows = smaller(kTall, block.rows - r);
      const Seen tile = seen_by(block.position(r), block.position(r + rows - 1), first, count, rule.window);
      const int64_t from = tile.lo / kPadding * kPadding, to = padded(tile.hi), some = to - from;
      float *shares = scratch.shares + r * kKeysAtOnce, *slopes = scratch.slopes + r * kKeysAtOnce;
      if (tile.hi > tile.lo) {
        product(rows, some, wide, scratch.q + r * wide, wide, 1, keys.k_turned + at + from, across, shares + from,
                kKeysAtOnce, false);
        product(rows, some, wide, scratch.grad + r * wide, wide, 1, keys.v_turned + at + from, across, slopes + from,
                kKeysAtOnce, false);
      }
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t position = block.position(r + i);
        slopes_of(shares + i * kKeysAtOnce, slopes + i * kKeysAtOnce, padded(all.hi),
                  seen_by(position, position, first, count, rule.window), rule, scratch.largest[r + i],
                  scratch.sums[r + i]);
      }
      if (tile.hi > tile.lo) {
        product(rows, wide, tile.hi - from, slopes + from, kKeysAtOnce, 1, keys.k + (at + from) * wide, wide,
                scratch.out + r * wide, wide, true);
      }
    }
    for (int64_t j = all.lo; j < all.hi; j += kTall) {
      const int64_t some = smaller(kTall, all.hi - j);
      const int64_t r = larger_of(0, first + j - block.first) * heads.group;  // rows before it see none of these keys
      int64_t stop = block.rows;
      if (rule.window > 0) {
        stop = smaller(stop, (first + j + some - 1 + rule.window - block.first) * heads.group);
      }
      if (stop <= r) continue;
      product(some, wide, stop - r, scratch.slopes + r * kKeysAtOnce + j, 1, kKeysAtOnce, scratch.q + r * wide, wide,
              keys.k_grad + (at + j) * wide, wide, true);
      product(some, wide, stop - r, scratch.shares + r * kKeysAtOnce + j, 1, kKeysAtOnce, scratch.grad + r * wide, wide,
              keys.v_grad + (at + j) * wide, wide, true);
    }
  }
}

template <typename scalar_t>
REALHF_INLINE void segment_backward(const Call<scalar_t>& call, const Segment& segment, int64_t kv_head,
                                    const Keys& keys, Scratch& scratch) {
  const Inputs<scalar_t>& in = call.in;
  const Heads& heads = call.heads;
  const Gradients<scalar_t>& result = call.gradients;
  const int64_t at_once = larger_of(1, kRowsAtOnce / heads.group), wide = heads.wide;
  for (int64_t p = 0; p < segment.length; p += at_once) {
    const int64_t n = smaller(at_once, segment.length - p), token = segment.start + p, head = kv_head * heads.group;
    const Block block{n * heads.group, segment.first + p, heads.group};
    gather_rows(in.q + token * in.q_token + head * in.q_head, in.q_token, n, in.q_head, heads.group, heads,
                call.rule.scale, scratch.q);
    rotate_rows(call.rotation, block.rows, heads.group, block.first, 1.0f, wide, scratch.q);
    gather_rows(in.grad + token * in.grad_token + head * in.grad_head, in.grad_token, n, in.grad_head, heads.group,
                heads, 1.0f, scratch.grad);
    gather_rows(in.out + (token * heads.count + head) * heads.dim, heads.count * heads.dim, n, heads.dim, heads.group,
                heads, 1.0f, scratch.out);
    for (int64_t r = 0; r < block.rows; ++r) {
      const float *grad = scratch.grad + r * wide, *out = scratch.out + r * wide;
      Floats along = {};
      for (int64_t c = 0; c < wide; c += kLanes) along += load(grad + c) * load(out + c);
      scratch.sums[r] = total_of(along);
      scratch.largest[r] = in.normalisers[(token + r / heads.group) * heads.count + head + r % heads.group];
    }
    __builtin_memset(scratch.out, 0, sizeof(float) * block.rows * wide);
    attend_backward(heads, call.rule, block, keys, scratch);
    rotate_rows(call.rotation, block.rows, heads.group, block.first, -1.0f, wide, scratch.out);
    for (int64_t r = 0; r < block.rows; ++r) {
      scalar_t* const to = result.q + (token + r / heads.group) * result.token + (head + r % heads.group) * heads.dim;
      scatter_row(to, scratch.out + r * wide, heads, call.rule.scale);
    }
  }
}

template <typename scalar_t>
REALHF_INLINE void scatter_keys(const Call<scalar_t>& call, const Segment& segment, int64_t kv_head, const Keys& keys) {
  const int64_t wide = call.heads.wide, row = segment.first * wide;
  rotate_rows(call.rotation, segment.length, 1, segment.first, -1.0f, wide, keys.k_grad + row);
  for (int64_t i = 0; i < segment.length; ++i) {
    const int64_t place = (segment.start + i) * call.gradients.token + kv_head * call.heads.dim;
    scatter_row(call.gradients.k + place, keys.k_grad + row + i * wide, call.heads, 1.0f);
    scatter_row(call.gradients.v + place, keys.v_grad + row + i * wide, call.heads, 1.0f);
  }
}

template <typename scalar_t>
REALHF_INLINE void any_family_forward(const Call<scalar_t>& call, const Family& family, int64_t kv_head,
                                      Scratch& scratch) {
  gather_keys(call, family.shared, kv_head, false, scratch.keys);
  segment_forward(call, family.shared, kv_head, scratch.keys, scratch);
  for (int64_t i = 0; i < family.n_followers; ++i) {
    gather_keys(call, family.followers[i], kv_head, false, scratch.keys);
    segment_forward(call, family.followers[i], kv_head, scratch.keys, scratch);
  }
}

template <typename scalar_t>
REALHF_INLINE void any_family_backward(const Call<scalar_t>& call, const Family& family, int64_t kv_head,
                                       Scratch& scratch) {
  gather_keys(call, family.shared, kv_head, true, scratch.keys);
  segment_backward(call, family.shared, kv_head, scratch.keys, scratch);
  for (int64_t i = 0; i < family.n_followers; ++i) {
    gather_keys(call, family.followers[i], kv_head, true, scratch.keys);
    segment_backward(call, family.followers[i], kv_head, scratch.keys, scratch);
    scatter_keys(call, family.followers[i], kv_head, scratch.keys);
  }
  scatter_keys(call, family.shared, kv_head, scratch.keys);
}

void family_attention(const Call<float>& call, const Family& family, int64_t kv_head, bool backward, Scratch& scratch) {
  backward ? any_family_backward(call, family, kv_head, scratch) : any_family_forward(call, family, kv_head, scratch);
}

void family_attention(const Call<BFloat16>& call, const Family& family, int64_t kv_head, bool backward,
                      Scratch& scratch) {
  backward ? any_family_backward(call, family, kv_head, scratch) : any_family_forward(call, family, kv_head, scratch);
}

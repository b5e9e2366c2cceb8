// Several decoding steps of rows without the host: embedding, blocks, logits, and the tokens that are drawn. Included
// once, inside the namespace of decode.cpp.

constexpr int64_t kSkipped = -2;  // the token of a row that has ended before

// A stage that is a whole model has these beside its blocks. `scales` multiply embeddings one after the other.
template <typename scalar_t>
struct Ends {
  const scalar_t *embed, *of_positions;  // [vocab, D]; [positions, D], or null
  float scales[2], logit_scale;
  Matrix<scalar_t> head;
  int64_t vocab;
  uint64_t seed;
  DrawRule rule;
  int64_t min_count;  // the forbidden tokens are left out of a row's first ones
  const int64_t* stops;
  int64_t n_stops;
};

struct LiveRow {
  int64_t row, token, position, prompt, sample, count, limit;
};

// Rows that a team, or one thread, takes through steps. A row's results do not depend on the other rows.
template <typename scalar_t>
class RowSteps {
 public:
  using Blocks = void (*)(const Shape&, const Stage<scalar_t>&, int64_t, int64_t, Buffers&);
  using Product = void (*)(const Matrix<scalar_t>&, int64_t, const float*, float*, int64_t);

  RowSteps(const Shape& shape, const Stage<scalar_t>& stage, const Ends<scalar_t>& ends, Blocks blocks, Product product,
           std::vector<LiveRow> rows, int64_t n_all, const Team& team)
      : shape_(shape), ends_(ends), stage_(stage), blocks_(blocks), product_(product), live_(std::move(rows)),
        n_all_(n_all), prefixes_of_all_(stage.prefixes), buffers_(shape, at_once(), team), x_(size() * shape.hidden),
        hidden_(x_.size()), positions_(size()), slots_(size()), prefixes_(stage.prefixes ? 3 * size() : 0),
        states_(at_once() * shape.hidden), logits_(at_once() * ends.head.outs), drawn_(size()) {
    for (int64_t i = 0; i < team.n_threads; ++i) drawers_.emplace_back(ends.vocab);
    stage_.x = x_.data(), stage_.result = hidden_.data();
    stage_.positions = positions_.data(), stage_.slots = slots_.data();
    stage_.prefixes = stage.prefixes ? prefixes_.data() : nullptr;
  }

  // Writes tokens and two log-probabilities to `out`, [n_steps, 3, rows of the call].
  void run(int64_t n_steps, double* out) {
    for (int64_t step = 0; step < n_steps && size() > 0; ++step, out += 3 * n_all_) {
      gather();
      for (int64_t first = 0; first < size(); first += kRowsAtOnce) {
        const int64_t count = std::min(kRowsAtOnce, size() - first);
        buffers_.find_groups(first, count, stage_.positions, stage_.prefixes, stage_.slots, size());
        blocks_(shape_, stage_, first, count, buffers_);
        draw(first, count);
      }
      end_step(out);
    }
  }

 private:
  int64_t size() const { return live_.size(); }
  int64_t at_once() const { return std::min(kRowsAtOnce, size()); }

  void gather() {
    for (int64_t i = 0; i < size(); ++i) {
      const LiveRow& live = live_[i];
      positions_[i] = live.position, slots_[i] = live.row;
      for (int64_t column = 0; stage_.prefixes && column < 3; ++column) {
        prefixes_[column * size() + i] = prefixes_of_all_[column * n_all_ + live.row];
      }
      embed(live, x_.data() + i * shape_.hidden);
    }
  }

  // Rounds to the model's type after every operation, as the operations of embed_tokens do.
  void embed(const LiveRow& live, scalar_t* to) const {
    const scalar_t* const from = ends_.embed + live.token * shape_.hidden;
    const scalar_t* const place = ends_.of_positions ? ends_.of_positions + live.position * shape_.hidden : nullptr;
    for (int64_t c = 0; c < shape_.hidden; c += kLanes) {
      store(to + c, load(from + c));
      for (const float scale : ends_.scales) {
        if (scale != 1) store(to + c, load(to + c) * scale);
      }
      if (place) store(to + c, load(to + c) + load(place + c));
    }
  }

  void draw(int64_t first, int64_t count) {
    scalar_t* const hidden = hidden_.data() + first * shape_.hidden;
    for (int64_t c = 0; c < count * shape_.hidden; c += kLanes) {
      if (ends_.logit_scale != 1) store(hidden + c, load(hidden + c) * ends_.logit_scale);
      store(states_.data() + c, load(hidden + c));
    }
    first_ = first, count_ = count;
    buffers_.team.run(n_threads(), product_part, this);
    buffers_.team.run(n_threads(), draw_part, this);
  }

  int64_t n_threads() const { return buffers_.team.n_threads; }

  static void product_part(void* given, int64_t part) {
    auto& self = *static_cast<RowSteps*>(given);
    const Matrix<scalar_t>& head = self.ends_.head;
    const int64_t n_tiles = head.outs / kPadding, from = part * n_tiles / self.n_threads() * kPadding;
    const int64_t outs = (part + 1) * n_tiles / self.n_threads() * kPadding - from;
    if (outs == 0) return;
    self.product_(head.part(from, outs), self.count_, self.states_.data(), self.logits_.data() + from, head.outs);
  }

  static void draw_part(void* given, int64_t part) {
    auto& self = *static_cast<RowSteps*>(given);
    const Ends<scalar_t>& ends = self.ends_;
    for (int64_t i = part; i < self.count_; i += self.n_threads()) {
      const LiveRow& live = self.live_[self.first_ + i];
      const double u = uniform_of(ends.seed, live.prompt, live.sample, live.count);
      self.drawn_[self.first_ + i] = self.drawers_[part].draw(self.logits_.data() + i * ends.head.outs, ends.rule,
                                                              live.count < ends.min_count, u);
    }
  }

  void end_step(double* out) {
    int64_t n_kept = 0;
    for (int64_t i = 0; i < size(); ++i) {
      LiveRow& live = live_[i];
      const Sampled& drawn = drawn_[i];
      out[live.row] = static_cast<double>(drawn.token);
      out[n_all_ + live.row] = drawn.logprob, out[2 * n_all_ + live.row] = drawn.sampling_logprob;
      live.token = drawn.token, ++live.position, ++live.count;
      const bool is_stop = std::find(ends_.stops, ends_.stops + ends_.n_stops, drawn.token) != ends_.stops + ends_.n_stops;
      if (drawn.token != kNoToken && !is_stop && live.count < live.limit) live_[n_kept++] = live;
    }
    live_.resize(n_kept);
  }

  const Shape& shape_;
  const Ends<scalar_t>& ends_;
  Stage<scalar_t> stage_;
  Blocks blocks_;
  Product product_;
  std::vector<LiveRow> live_;
  int64_t n_all_;
  const int64_t* prefixes_of_all_;
  Buffers buffers_;
  std::vector<scalar_t> x_, hidden_;
  std::vector<int64_t> positions_, slots_, prefixes_;
  std::vector<float> states_, logits_;
  std::vector<Sampled> drawn_;
  std::vector<Row> drawers_;
  int64_t first_ = 0, count_ = 0;
};

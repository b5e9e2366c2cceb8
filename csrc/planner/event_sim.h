// Discrete-event simulation of workers with FIFO queues, as in realhf/plan/search/event_sim.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "problem.h"

namespace planner {

// A set of rank classes as a bit mask.
using RankSet = uint64_t;
constexpr int kMaxRankClasses = 64;

struct OpSpec {
  RankSet ranks;
  Cost cost;
};

class WorkerQueues {
 public:
  // Calls are identified by numbers below `n_calls`; a number is used by one call at a time.
  void reset(int n_workers, int n_calls, double cores, double latency) {
    now = 0, speed_ = 1, cores_ = cores, latency_ = latency, n_sent_ = 0;
    ops_.clear(), running_.clear();
    if (static_cast<int>(queues_.size()) < n_workers) queues_.resize(n_workers);
    for (auto &queue : queues_) queue.ops.clear(), queue.head = 0;
    calls_.assign(n_calls, Call{});
  }

  void open(int call, int n_ops) { calls_[call] = Call{n_ops, n_sent_++, 0, false}; }

  void send(int call, const OpSpec &spec) {
    const int number = static_cast<int>(ops_.size());
    ops_.push_back({spec.ranks, spec.cost, 0, call, __builtin_popcountll(spec.ranks)});
    for (RankSet left = spec.ranks; left; left &= left - 1) {
      Queue &queue = queues_[__builtin_ctzll(left)];
      queue.ops.push_back(number);
      if (queue.head + 1 == queue.ops.size()) reach(number);
    }
  }

  // Updates the speed and the ends of all running operations.
  void share_cores() {
    if (cores_ == 0) return;
    double wanted = 0;
    for (int number : running_) wanted += ops_[number].cost.cores();
    const double speed = wanted != 0 ? std::min(1.0, cores_ / wanted) : 1.0;
    if (speed == speed_) return;
    for (int number : running_) {
      double &end = ops_[number].end;
      end = now + (end - now) * speed_ / speed;
    }
    speed_ = speed;
  }

  // Advances the time until the master learns of a finished call and returns its number; -1 if none is in flight.
  int next_finished() {
    for (;;) {
      const int call = first_finished();
      if (running_.empty()) return take(call);
      const auto first = std::min_element(running_.begin(), running_.end(),
                                          [this](int a, int b) { return ops_[a].end < ops_[b].end; });
      if (call >= 0 && calls_[call].reported < ops_[*first].end) return take(call);
      const int number = *first;
      running_.erase(first);
      finish(number);
    }
  }

  double now = 0;

 private:
  struct Op {
    RankSet ranks;
    Cost cost;
    double end;
    int call;
    int n_missing;  // workers at which it is not at the head of the queue
  };
  struct Queue {
    std::vector<int> ops;
    size_t head = 0;
  };
  struct Call {
    int n_unfinished = 0, number = 0;
    double reported = 0;  // when the master learns that it has finished
    bool finished = false;
  };

  void reach(int number) {
    Op &op = ops_[number];
    if (--op.n_missing) return;
    op.end = now + op.cost.seconds / speed_;
    running_.push_back(number);
  }

  void finish(int number) {
    now = ops_[number].end;
    for (RankSet left = ops_[number].ranks; left; left &= left - 1) {
      Queue &queue = queues_[__builtin_ctzll(left)];
      if (++queue.head < queue.ops.size()) reach(queue.ops[queue.head]);
    }
    Call &call = calls_[ops_[number].call];
    if (!--call.n_unfinished) call.reported = now + latency_, call.finished = true;
    share_cores();
  }

  int first_finished() const {
    int best = -1;
    for (int i = 0; i < static_cast<int>(calls_.size()); ++i) {
      if (!calls_[i].finished) continue;
      const bool earlier = best < 0 || calls_[i].reported < calls_[best].reported ||
                           (calls_[i].reported == calls_[best].reported && calls_[i].number < calls_[best].number);
      if (earlier) best = i;
    }
    return best;
  }

  int take(int call) {
    if (call >= 0) now = calls_[call].reported, calls_[call].finished = false;
    return call;
  }

  double speed_ = 1, cores_ = 0, latency_ = 0;
  int n_sent_ = 0;
  std::vector<Op> ops_;
  std::vector<int> running_;
  std::vector<Queue> queues_;
  std::vector<Call> calls_;
};

}  // namespace planner

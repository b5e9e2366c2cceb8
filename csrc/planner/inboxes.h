// Workers that carry out their inboxes in order, under a clock: the twin of realhf/plan/search/event_sim.py.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "problem.h"

namespace planner {

// A set of workers, by bits.
using Ranks = uint64_t;
constexpr int kMaxRanks = 64;

struct Work {
  Ranks ranks;
  Cost cost;
};

class Inboxes {
 public:
  // `n_orders` may be under way at a time; they are known by numbers below that.
  void reset(int n_workers, int n_orders, double cores, double latency) {
    now = 0, speed_ = 1, cores_ = cores, latency_ = latency, n_sent_ = 0;
    jobs_.clear(), running_.clear();
    if (static_cast<int>(queues_.size()) < n_workers) queues_.resize(n_workers);
    for (auto &queue : queues_) queue.jobs.clear(), queue.head = 0;
    orders_.assign(n_orders, Order{});
  }

  void open(int order, int n_jobs) { orders_[order] = Order{n_jobs, n_sent_++, 0, false}; }

  void send(int order, const Work &work) {
    const int number = static_cast<int>(jobs_.size());
    jobs_.push_back({work.ranks, work.cost, 0, order, __builtin_popcountll(work.ranks)});
    for (Ranks left = work.ranks; left; left &= left - 1) {
      Queue &queue = queues_[__builtin_ctzll(left)];
      queue.jobs.push_back(number);
      if (queue.head + 1 == queue.jobs.size()) reach(number);
    }
  }

  // Sets the speed of all running jobs to what the cores allow, and their ends accordingly.
  void share_cores() {
    if (cores_ == 0) return;
    double wanted = 0;
    for (int number : running_) wanted += jobs_[number].cost.cores();
    const double speed = wanted != 0 ? std::min(1.0, cores_ / wanted) : 1.0;
    if (speed == speed_) return;
    for (int number : running_) {
      double &end = jobs_[number].end;
      end = now + (end - now) * speed_ / speed;
    }
    speed_ = speed;
  }

  // Lets time pass until an order is over and returns its number; -1 when nothing is under way.
  int next_over() {
    for (;;) {
      const int over = first_over();
      if (running_.empty()) return take(over);
      const auto first = std::min_element(running_.begin(), running_.end(),
                                          [this](int a, int b) { return jobs_[a].end < jobs_[b].end; });
      if (over >= 0 && orders_[over].heard < jobs_[*first].end) return take(over);
      const int number = *first;
      running_.erase(first);
      finish(number);
    }
  }

  double now = 0;

 private:
  struct Job {
    Ranks ranks;
    Cost cost;
    double end;
    int order;
    int missing;  // workers that have not reached it
  };
  struct Queue {
    std::vector<int> jobs;
    size_t head = 0;
  };
  struct Order {
    int left = 0, number = 0;
    double heard = 0;
    bool over = false;
  };

  void reach(int number) {
    Job &job = jobs_[number];
    if (--job.missing) return;
    job.end = now + job.cost.seconds / speed_;
    running_.push_back(number);
  }

  void finish(int number) {
    now = jobs_[number].end;
    for (Ranks left = jobs_[number].ranks; left; left &= left - 1) {
      Queue &queue = queues_[__builtin_ctzll(left)];
      if (++queue.head < queue.jobs.size()) reach(queue.jobs[queue.head]);
    }
    Order &order = orders_[jobs_[number].order];
    if (!--order.left) order.heard = now + latency_, order.over = true;
    share_cores();
  }

  int first_over() const {
    int best = -1;
    for (int i = 0; i < static_cast<int>(orders_.size()); ++i) {
      if (!orders_[i].over) continue;
      const bool earlier = best < 0 || orders_[i].heard < orders_[best].heard ||
                           (orders_[i].heard == orders_[best].heard && orders_[i].number < orders_[best].number);
      if (earlier) best = i;
    }
    return best;
  }

  int take(int over) {
    if (over >= 0) now = orders_[over].heard, orders_[over].over = false;
    return over;
  }

  double speed_ = 1, cores_ = 0, latency_ = 0;
  int n_sent_ = 0;
  std::vector<Job> jobs_;
  std::vector<int> running_;
  std::vector<Queue> queues_;
  std::vector<Order> orders_;
};

}  // namespace planner

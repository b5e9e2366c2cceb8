// The layout choice as tables; realhf/plan/search/problem.py documents the fields.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace planner {

struct Cost {
  double seconds, core_seconds;

  // Average number of busy cores at full speed.
  double cores() const { return seconds != 0 ? core_seconds / seconds : 0; }
};

struct Range {
  int start, stop;
};

struct LayoutOption {
  Range ranks, holders;
  std::vector<Cost> compute;  // by the number of the call, cyclically
  Cost transfer, load, offload;
  double transient, resident;
};

struct ReallocCost {
  Cost cost;
  double nbytes, rings;
};

// Python callback for a table entry: seconds, core-seconds, bytes, ring bytes. Returns nonzero on failure.
using FillEntry = int (*)(int table, int row, int column, double *entry);
struct FillError {};

// A table whose entries are filled on first use.
class CostTable {
 public:
  CostTable(int number, size_t n_rows, size_t n_columns)
      : number_(number), n_columns_(n_columns), entries_(n_rows * n_columns, ReallocCost{{NAN, NAN}, NAN, NAN}) {}

  const ReallocCost &at(int row, int column, FillEntry fill) {
    ReallocCost &entry = entries_[row * n_columns_ + column];
    if (std::isnan(entry.nbytes)) {
      double values[4];
      if (fill(number_, row, column, values) != 0) throw FillError{};
      entry = {{values[0], values[1]}, values[2], values[3]};
    }
    return entry;
  }

 private:
  int number_;
  size_t n_columns_;
  std::vector<ReallocCost> entries_;
};

// An MFC's dependencies (MFCDeps in Python) and options.
struct Mfc {
  std::vector<int> parents, row_sources;
  std::vector<std::vector<int>> couriers;  // of each row source
  int updater, allowed_staleness, home_mfc, batch_size;
  bool offloaded, after_filter;
  std::vector<LayoutOption> options;
  std::vector<CostTable> reallocs;  // one if the home MFC is another MFC, else none
};

struct EMASync {
  int after, source, target;
  CostTable costs;
};

struct Problem {
  std::vector<Mfc> mfcs;
  std::vector<int> order;
  std::vector<EMASync> ema_syncs;
  int batch_size, n_steps, first_steady_step, last_steady_step, max_staleness, filter_mfc;
  double capacity, call_seconds, cores;
  FillEntry fill;
};

}  // namespace planner

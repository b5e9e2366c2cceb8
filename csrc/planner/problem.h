// The choice of layouts as tables: the twin of realhf/plan/search/problem.py, where every field is explained.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace planner {

struct Cost {
  double seconds, work;

  // Cores kept busy at full speed.
  double cores() const { return seconds != 0 ? work / seconds : 0; }
};

struct Range {
  int start, stop;
};

struct Option {
  Range ranks, holders;
  Cost compute, transfer, load, offload;
  double transient, resident;
};

struct Move {
  Cost cost;
  double nbytes, rings;
};

// Asks Python for an entry of a table: seconds, work, bytes, bytes of rings. Not 0: it failed.
using Fill = int (*)(int table, int row, int column, double *entry);
struct Failed {};

// A table that is filled where it is looked at.
class Table {
 public:
  Table(int number, size_t n_rows, size_t n_columns)
      : number_(number), n_columns_(n_columns), entries_(n_rows * n_columns, Move{{NAN, NAN}, NAN, NAN}) {}

  const Move &at(int row, int column, Fill fill) {
    Move &entry = entries_[row * n_columns_ + column];
    if (std::isnan(entry.nbytes)) {
      double got[4];
      if (fill(number_, row, column, got) != 0) throw Failed{};
      entry = {{got[0], got[1]}, got[2], got[3]};
    }
    return entry;
  }

 private:
  int number_;
  size_t n_columns_;
  std::vector<Move> entries_;
};

struct Mfc {
  std::vector<int> parents, sources;
  int updater, lag, keeper, chunk;
  bool offloaded;
  std::vector<Option> options;
  std::vector<Table> moves;  // one where the keeper is another MFC, else none
};

struct Follow {
  int after, source, target;
  Table costs;
};

struct Problem {
  std::vector<Mfc> mfcs;
  std::vector<int> order;
  std::vector<Follow> follows;
  int batch_size, n_steps, n_settled, max_staleness;
  double capacity, call_seconds, cores;
  Fill fill;
};

}  // namespace planner

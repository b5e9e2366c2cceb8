// The packed rows of the gated delta rule and of its convolution: `rows` [2, B] has lengths and prefixes.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace realhf {

constexpr int64_t kMaxSize = 1 << 24;  // of every size, whose products must not overflow

// A packed row: its first token, its number of tokens, and the row that it continues or -1.
struct DeltaRow {
  int64_t start, count, prefix;
};

struct DeltaTable {
  std::vector<DeltaRow> rows;
  std::vector<int64_t> roots, children;  // without and with a prefix
  int64_t tokens = 0;
};

inline DeltaTable checked_table(const torch::stable::Tensor& given) {
  STD_TORCH_CHECK(given.dim() == 2 && given.size(0) == 2 && given.is_contiguous() &&
                      given.scalar_type() == torch::headeronly::ScalarType::Long,
                  "rows must be [2, B] int64, contiguous: lengths and prefixes");
  const int64_t count = given.size(1);
  const int64_t *lengths = given.const_data_ptr<int64_t>(), *prefixes = lengths + count;
  DeltaTable table;
  for (int64_t row = 0; row < count; ++row) {
    const int64_t length = lengths[row], prefix = prefixes[row];
    STD_TORCH_CHECK(length >= 0 && length <= kMaxSize && table.tokens <= kMaxSize, "a row of ", length, " tokens");
    STD_TORCH_CHECK(prefix >= -1 && prefix < count && (prefix < 0 || prefixes[prefix] < 0), "row ", row, " continues ",
                    prefix);
    table.rows.push_back({table.tokens, length, prefix});
    (prefix < 0 ? table.roots : table.children).push_back(row);
    table.tokens += length;
  }
  return table;
}

}  // namespace realhf

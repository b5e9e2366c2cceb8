// One allocation for the buffers of a thread, each aligned to a cache line: unaligned loads take twice the time.
#pragma once

#include <cstdint>
#include <memory>

namespace realhf {

// `place(take)` assigns every buffer from `take(size)`, which returns the next `size` floats. It is called twice: first
// to compute the total size.
template <typename Place>
std::unique_ptr<float[]> aligned_buffers(const Place& place) {
  constexpr int64_t kLine = 16;
  float* at = nullptr;
  const auto take = [&at](int64_t size) {
    float* here = at;
    at += (size + kLine - 1) / kLine * kLine;
    return here;
  };
  place(take);
  std::unique_ptr<float[]> memory(new float[at - static_cast<float*>(nullptr) + kLine]);
  at = memory.get() + (-reinterpret_cast<intptr_t>(memory.get()) & 63) / sizeof(float);
  place(take);
  return memory;
}

}  // namespace realhf

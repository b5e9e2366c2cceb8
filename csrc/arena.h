// Memory of one thread's work, in parts that begin with a line of the cache: loads across two take twice the time.
#pragma once

#include <cstdint>
#include <memory>

namespace realhf {

// `place(take)` says where each part is, `take(size)` being the next `size` floats; it is called twice, first to learn
// how much there is to be.
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

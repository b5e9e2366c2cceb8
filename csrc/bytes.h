// Copies of non-overlapping bytes with normal or non-temporal stores.
#pragma once

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace realhf {

using CopyBytes = void (*)(char* to, const char* from, int64_t n_bytes);

inline void copy_cached(char* to, const char* from, int64_t n_bytes) { std::memcpy(to, from, n_bytes); }

// Normal stores read the target's cache lines first, which adds half of the traffic and evicts other data.
inline void copy_streaming(char* to, const char* from, int64_t n_bytes) {
#if defined(__SSE2__)
  constexpr int64_t kWidth = sizeof(__m128i);
  const int64_t head = std::min<int64_t>(n_bytes, -reinterpret_cast<intptr_t>(to) & (4 * kWidth - 1));
  std::memcpy(to, from, head);
  int64_t at = head;
  for (; at + 4 * kWidth <= n_bytes; at += 4 * kWidth) {
    for (int64_t part = at; part < at + 4 * kWidth; part += kWidth) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + part),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + part)));
    }
  }
  std::memcpy(to + at, from + at, n_bytes - at);
#else
  std::memcpy(to, from, n_bytes);
#endif
}

// Makes non-temporal stores visible to other threads.
inline void finish_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

}  // namespace realhf

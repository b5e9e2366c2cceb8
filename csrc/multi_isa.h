// Compiles the file that REALHF_KERNEL_FILE names once for every width of registers, over simd_vec.h; `best_isa` picks what this
// machine runs. Included once in a source file, inside its namespace. Sums of products are fused here, where a machine
// can: one that cannot gives other last bits.
#define REALHF_NOINLINE __attribute__((noinline, noclone, unused)) static  // compiled once, not into its callers

namespace baseline {
#define REALHF_WIDTH 4
#define REALHF_MAX_ROWS 6
#include "simd_vec.h"
#include REALHF_KERNEL_FILE
#undef REALHF_WIDTH
#undef REALHF_MAX_ROWS
}  // namespace narrow

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")  // a fused sum of products is half the work
#pragma GCC target("avx2,fma")
namespace avx2 {
#define REALHF_WIDTH 8
#define REALHF_MAX_ROWS 6
#include "simd_vec.h"
#include REALHF_KERNEL_FILE
#undef REALHF_WIDTH
#undef REALHF_MAX_ROWS
}  // namespace avx2
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#define REALHF_WIDTH 16
#define REALHF_MAX_ROWS 8
#include "simd_vec.h"
#include REALHF_KERNEL_FILE
#undef REALHF_WIDTH
#undef REALHF_MAX_ROWS
}  // namespace avx512
#pragma GCC pop_options

#define REALHF_ALL_ISAS(...) baseline::__VA_ARGS__, avx2::__VA_ARGS__, avx512::__VA_ARGS__
template <typename Function>
Function best_isa(Function of_baseline, Function of_avx2, Function of_avx512) {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return of_avx512;
  }
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? of_avx2 : of_baseline;
}
#else
#define REALHF_ALL_ISAS(...) baseline::__VA_ARGS__
template <typename Function>
Function best_isa(Function of_baseline) {
  return of_baseline;
}
#endif

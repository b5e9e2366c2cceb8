// Compiles REALHF_KERNEL_FILE once per instruction set, with simd_vec.h; `best_isa` selects the function for this
// machine. Included once per source file, inside its namespace. Multiply-adds are fused if the machine can, so the last
// bits differ between instruction sets.
#define REALHF_NOINLINE \
  __attribute__((noinline, noclone, unused)) static  // compiled once per instruction set, not inlined

namespace baseline {
#define REALHF_WIDTH 4
#define REALHF_MAX_ROWS 6
#include "simd_vec.h"
#include REALHF_KERNEL_FILE
#undef REALHF_WIDTH
#undef REALHF_MAX_ROWS
}  // namespace baseline

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")  // a fused multiply-add is half the work
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

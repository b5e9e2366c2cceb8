// Compiles REALHF_KERNEL_FILE once per instruction set, with simd_vec.h; `best_isa` selects the function for this
// machine. Included once per source file, inside its namespace, after bf16_dot.h if the file has products of bfloat16
// pairs. Multiply-adds are fused if the machine can, so the last bits differ between instruction sets.
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
#ifdef REALHF_DOT_EMULATED
#define REALHF_DOT_PAIRS REALHF_DOT_EMULATED
#endif
#include REALHF_KERNEL_FILE
#undef REALHF_DOT_PAIRS
#undef REALHF_WIDTH
#undef REALHF_MAX_ROWS
}  // namespace avx2
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
#define REALHF_WIDTH 16
#define REALHF_MAX_ROWS 8
#include "simd_vec.h"
#include REALHF_KERNEL_FILE
#ifdef REALHF_DOT_X86
}  // namespace avx512
#pragma GCC target("avx512bf16")
namespace avx512_bf16 {
#include "simd_vec.h"
#define REALHF_DOT_PAIRS REALHF_DOT_X86
#include REALHF_KERNEL_FILE
#undef REALHF_DOT_PAIRS
#endif
#undef REALHF_WIDTH
#undef REALHF_MAX_ROWS
}  // namespace avx512 or avx512_bf16
#pragma GCC pop_options

template <typename Function>
Function best_isa(Function of_baseline, Function of_avx2, Function of_avx512) {
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return of_avx512;
  }
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? of_avx2 : of_baseline;
}
#ifdef REALHF_DOT_X86
#define REALHF_ALL_ISAS(...) baseline::__VA_ARGS__, avx2::__VA_ARGS__, avx512::__VA_ARGS__, avx512_bf16::__VA_ARGS__
template <typename Function>
Function best_isa(Function of_baseline, Function of_avx2, Function of_avx512, Function of_bf16) {
  return best_isa(of_baseline, of_avx2, __builtin_cpu_supports("avx512bf16") ? of_bf16 : of_avx512);
}
#else
#define REALHF_ALL_ISAS(...) baseline::__VA_ARGS__, avx2::__VA_ARGS__, avx512::__VA_ARGS__
#endif
#elif defined(REALHF_DOT_ARM)
#pragma GCC push_options
#pragma GCC optimize("fp-contract=fast")
#pragma GCC target("arch=armv8.2-a+bf16")
namespace neon_bf16 {
#define REALHF_WIDTH 4
#define REALHF_MAX_ROWS 6
#include "simd_vec.h"
#define REALHF_DOT_PAIRS REALHF_DOT_ARM
#include REALHF_KERNEL_FILE
#undef REALHF_DOT_PAIRS
#undef REALHF_WIDTH
#undef REALHF_MAX_ROWS
}  // namespace neon_bf16
#pragma GCC pop_options

#define REALHF_ALL_ISAS(...) baseline::__VA_ARGS__, neon_bf16::__VA_ARGS__
template <typename Function>
Function best_isa(Function of_baseline, Function of_bf16) {
  return (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0 ? of_bf16 : of_baseline;
}
#else
#define REALHF_ALL_ISAS(...) baseline::__VA_ARGS__
template <typename Function>
Function best_isa(Function of_baseline) {
  return of_baseline;
}
#endif

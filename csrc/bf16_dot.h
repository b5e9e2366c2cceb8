// Instructions that add the products of two pairs of bfloat16 numbers to each float32 lane: (sums, pairs, pair), where
// every word of `pairs` has two numbers and the word `pair` two, the first in the lower half. multi_isa.h compiles kernels
// with them for AVX512-BF16 and for Arm's BF16.
//
// The products are exact. AVX512-BF16 adds that of the second numbers first, and rounds after each; Arm adds the sum of
// both. They treat denormal numbers as zeros.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 10
#include <immintrin.h>
#define REALHF_DOT_X86(sums, pairs, pair) \
  (Vec) _mm512_dpbf16_ps((__m512)(sums), (__m512bh)(pairs), (__m512bh)_mm512_set1_epi32(static_cast<int>(pair)))
#elif defined(__aarch64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 10
#include <arm_neon.h>
#include <sys/auxv.h>
#ifndef HWCAP2_BF16
#define HWCAP2_BF16 (1 << 14)
#endif
#define REALHF_DOT_ARM(sums, pairs, pair) \
  (Vec) vbfdotq_f32((float32x4_t)(sums), (bfloat16x8_t)(pairs), (bfloat16x8_t)vdupq_n_u32(pair))
#endif

#ifdef REALHF_EMULATE_BF16_DOT  // in tests, on machines with AVX2
#define REALHF_DOT_EMULATED(sums, pairs, pair)                                                                      \
  (((sums) + (Vec)((pairs) & 0xffff0000u) * as_float(BFloat16{static_cast<uint16_t>((pair) >> 16)})) + \
   (Vec)((pairs) << 16) * as_float(BFloat16{static_cast<uint16_t>(pair)}))
#endif

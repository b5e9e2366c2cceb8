// What a CPU kernel needs to use wide registers where the machine has them and still run where it has not.
#pragma once

#include <cstdint>  // brings __GLIBC__, if anything does

// Compiles a function twice, for any x86-64 and for AVX2; the loader picks one. Both give the same bits, because the
// build forbids contraction of a*b+c (-ffp-contract=off).
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define REALHF_SIMD_CLONES __attribute__((target_clones("default", "avx2")))
#else
#define REALHF_SIMD_CLONES
#endif

// The kernel file of products.cpp: products with tiles, and whether they use instructions on pairs of bfloat16.
#include "tile_rows.h"

#ifdef REALHF_DOT_PAIRS
REALHF_NOINLINE bool has_dot() { return true; }
#else
REALHF_NOINLINE bool has_dot() { return false; }
#endif

/* Eight numbers at a time. */

#ifndef FARFLUNG_VECTORS_H
#define FARFLUNG_VECTORS_H

#include "kernels.h"

typedef float floats __attribute__((vector_size(32)));
typedef int32_t lanes __attribute__((vector_size(32))); /* a comparison gives 0 or -1 */

static inline floats broadcast(float value)
{
    return (floats){value, value, value, value, value, value, value, value};
}

static inline lanes choose_lanes(lanes which, lanes these, lanes others)
{
    return (which & these) | (~which & others);
}

#ifdef __AVX2__
#include <immintrin.h>

static inline floats choose(lanes which, floats these, floats others)
{
    return (floats)_mm256_blendv_ps((__m256)others, (__m256)these, (__m256)which);
}
#else
static inline floats choose(lanes which, floats these, floats others)
{
    return (floats)choose_lanes(which, (lanes)these, (lanes)others);
}
#endif

#endif

/* What all kernels share. They must give the bits of the PyTorch code that they stand in for, so:
   - each operation rounds once to fp32: no contraction to FMA, no extended precision, no -ffast-math;
   - nothing they do is undefined for any bytes and any floats: no float becomes an integer by conversion, payloads
     are read byte by byte, only what the caller has checked decides an address;
   - they return void and are called on contiguous memory whose sizes the caller has checked. */

#ifndef FARFLUNG_KERNELS_H
#define FARFLUNG_KERNELS_H

#include <float.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || FLT_EVAL_METHOD < 0 || FLT_EVAL_METHOD == 1 || FLT_EVAL_METHOD == 2
#error "fp32 arithmetic would not be rounded to fp32 after each operation"
#endif

static inline uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float bits_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float from_bf16(uint16_t bits)
{
    return bits_float((uint32_t)bits << 16);
}

/* Nearest, ties to even, as torch does it. */
static inline uint16_t to_bf16(float value)
{
    uint32_t bits = float_bits(value);
    if (bits << 1 > 0xff000000u)
        return 0x7fc0; /* NaN */
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The integer nearest to `value`, ties to even, plus that of `offset` (even, 0 to 254), modulo 256, for |value| < 2**21; any byte
   for any other. Adding 1.5 * 2**23 leaves no room below the units, so the addition rounds, and the sum's low byte is the answer. */
static inline uint8_t round_to_byte(float value, float offset)
{
    return (uint8_t)float_bits(value + (12582912.0f + offset));
}

#endif

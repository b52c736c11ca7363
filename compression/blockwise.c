/* int8 and int4: what _quantise, _pack and _unpack of blockwise.py, int8.py and int4.py do, in one pass. */

#include "kernels.h"

/* Stores the scale of `count` elements; returns its inverse, 0 for a scale of 0. */
static float store_scale(const float *x, size_t count, float largest, uint16_t *stored)
{
    uint32_t absmax = 0; /* without their sign bit, floats are ordered as integers, with NaN above all */
    for (size_t i = 0; i < count; i++) {
        uint32_t magnitude = float_bits(x[i]) & 0x7fffffff;
        absmax = magnitude > absmax ? magnitude : absmax;
    }
    uint16_t scale = to_bf16(bits_float(absmax) / largest);
    *stored = scale < 0x0080 ? 0 : scale; /* no subnormals */
    return *stored ? 1.0f / from_bf16(*stored) : 0.0f;
}

void int8_encode(const float *x, size_t numel, size_t block, uint16_t *scales, uint8_t *codes)
{
    for (size_t start = 0; start < numel; start += block, scales++) {
        size_t count = numel - start < block ? numel - start : block;
        float inverse = store_scale(x + start, count, 127.0f, scales);
        for (size_t i = start; i < start + count; i++)
            codes[i] = round_to_byte(x[i] * inverse, 0.0f);
    }
}

void int8_decode(const uint16_t *scales, const int8_t *codes, size_t numel, size_t block, float *out)
{
    for (size_t start = 0; start < numel; start += block, scales++) {
        size_t count = numel - start < block ? numel - start : block;
        float scale = from_bf16(*scales);
        for (size_t i = start; i < start + count; i++)
            out[i] = (float)codes[i] * scale;
    }
}

void int8_decode_add(const uint16_t *scales, const int8_t *codes, size_t numel, size_t block, float weight, float *acc)
{
    for (size_t start = 0; start < numel; start += block, scales++) {
        size_t count = numel - start < block ? numel - start : block;
        float scale = from_bf16(*scales);
        for (size_t i = start; i < start + count; i++) {
            float value = (float)codes[i] * scale;
            acc[i] += value * weight;
        }
    }
}

/* A block's first half is in the low nibbles of its bytes and the second in the high ones, each plus 8. A block of odd
   length, the last one, has a second half that is shorter by one; 0 stands in. */

void int4_encode(const float *x, size_t numel, size_t block, uint16_t *scales, uint8_t *codes)
{
    for (size_t start = 0; start < numel; start += block, scales++) {
        size_t count = numel - start < block ? numel - start : block;
        size_t half = (count + 1) / 2;
        float inverse = store_scale(x + start, count, 7.0f, scales);
        const float *low = x + start, *high = low + half;
        for (size_t i = 0; i < count - half; i++)
            codes[i] = (uint8_t)(round_to_byte(low[i] * inverse, 8.0f) | round_to_byte(high[i] * inverse, 8.0f) << 4);
        if (count % 2)
            codes[half - 1] = (uint8_t)(round_to_byte(low[half - 1] * inverse, 8.0f) | 8 << 4);
        codes += half;
    }
}

static inline float low_nibble(uint8_t byte)
{
    return (float)((byte & 15) - 8);
}

static inline float high_nibble(uint8_t byte)
{
    return (float)((byte >> 4) - 8);
}

void int4_decode(const uint16_t *scales, const uint8_t *codes, size_t numel, size_t block, float *out)
{
    for (size_t start = 0; start < numel; start += block, scales++) {
        size_t count = numel - start < block ? numel - start : block;
        size_t half = (count + 1) / 2;
        float scale = from_bf16(*scales);
        float *low = out + start, *high = low + half;
        for (size_t i = 0; i < count - half; i++) {
            low[i] = low_nibble(codes[i]) * scale;
            high[i] = high_nibble(codes[i]) * scale;
        }
        if (count % 2)
            low[half - 1] = low_nibble(codes[half - 1]) * scale;
        codes += half;
    }
}

void int4_decode_add(const uint16_t *scales, const uint8_t *codes, size_t numel, size_t block, float weight, float *acc)
{
    for (size_t start = 0; start < numel; start += block, scales++) {
        size_t count = numel - start < block ? numel - start : block;
        size_t half = (count + 1) / 2;
        float scale = from_bf16(*scales);
        float *low = acc + start, *high = low + half;
        for (size_t i = 0; i < count - half; i++) {
            float first = low_nibble(codes[i]) * scale, second = high_nibble(codes[i]) * scale;
            low[i] += first * weight;
            high[i] += second * weight;
        }
        if (count % 2) {
            float last = low_nibble(codes[half - 1]) * scale;
            low[half - 1] += last * weight;
        }
        codes += half;
    }
}

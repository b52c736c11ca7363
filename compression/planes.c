/* What the functions of planes.py do with NumPy, in one pass, 64 elements at a time: their masks are words of the planes.

   Plane a + 1 and, for a = 1, the signs have a bit for each one of plane a: a mask of elements becomes such bits by `pext` with the
   mask of the level before, and bits become a mask by `pdep`. */

#include "vectors.h"

enum { LEVELS = 24, BLOCK = 4096, UNITS = 256, COLUMNS = 16 }; /* as in planes.py */
enum { AHEAD = 512 }; /* elements; data asked for this early takes 15 % off planes_quantise */

typedef uint32_t counters __attribute__((vector_size(32)));
typedef int32_t packed __attribute__((vector_size(32), aligned(4), may_alias)); /* lanes anywhere in memory */

#ifdef __AVX2__
/* A bit for each of four times eight lanes: whether it is negative. */
static inline uint64_t mask_of(const lanes *which)
{
    __m256i low = _mm256_packs_epi32((__m256i)which[0], (__m256i)which[1]), high = _mm256_packs_epi32((__m256i)which[2], (__m256i)which[3]);
    __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* packing leaves halves of the vectors where they are */
    return (uint32_t)_mm256_movemask_epi8(_mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
}
#else
static inline uint64_t mask_of(const lanes *which)
{
    uint64_t mask = 0;
    for (size_t lane = 0; lane < 32; lane++)
        mask |= (uint64_t)((uint32_t)which[lane / 8][lane % 8] >> 31) << lane;
    return mask;
}
#endif

/* Zen 1 and 2 have these instructions, but in microcode. */
#if defined(__BMI2__) && !defined(__znver1__) && !defined(__znver2__)
#define pext(bits, mask) __builtin_ia32_pext_di(bits, mask)
#define pdep(bits, mask) __builtin_ia32_pdep_di(bits, mask)
#else
static inline uint64_t pext(uint64_t bits, uint64_t mask)
{
    uint64_t result = 0;
    for (unsigned at = 0; mask; mask &= mask - 1, at++)
        result |= (bits >> __builtin_ctzll(mask) & 1) << at;
    return result;
}

static inline uint64_t pdep(uint64_t bits, uint64_t mask)
{
    uint64_t result = 0;
    for (; mask; mask &= mask - 1, bits >>= 1)
        result |= (bits & 1) << __builtin_ctzll(mask);
    return result;
}
#endif

/* Up to 64 bits from bit `at`, and rubbish above them. Reads up to nine bytes. */
static inline uint64_t bits_at(const uint8_t *bytes, size_t at)
{
    uint64_t word;
    memcpy(&word, bytes + at / 8, sizeof word);
    return word >> at % 8 | (uint64_t)bytes[at / 8 + 8] << 1 << (63 - at % 8);
}

/* Puts up to 64 bits at bit `at` and zeros above them. Writes nine bytes. */
static inline void put_bits(uint8_t *bytes, size_t at, uint64_t bits)
{
    uint64_t word = (bytes[at / 8] & ((1u << at % 8) - 1)) | bits << at % 8;
    memcpy(bytes + at / 8, &word, sizeof word);
    bytes[at / 8 + 8] = (uint8_t)(bits >> 1 >> (63 - at % 8));
}

/* The sum of squares of each block, in the order of _squares: the square of a float is exact as a double, a sum is not. */
void planes_squares(const float *x, size_t numel, double *sums)
{
    float padded[BLOCK];
    for (size_t start = 0; start < numel; start += BLOCK) {
        const float *from = x + start;
        if (numel - start < BLOCK) {
            memset(padded, 0, sizeof padded);
            from = memcpy(padded, from, (numel - start) * sizeof *x);
        }
        double columns[COLUMNS] = {0}, sum = 0;
        for (size_t i = 0; i < BLOCK; i += COLUMNS)
            for (size_t column = 0; column < COLUMNS; column++)
                columns[column] += (double)from[i + column] * from[i + column];
        for (size_t column = 0; column < COLUMNS; column++)
            sum += columns[column];
        *sums++ = sum;
    }
}

void planes_quantise(
    const float *x, size_t numel, float inverse, const int32_t *thresholds, uint8_t *planes, size_t stride, uint8_t *signs, float *exact,
    uint32_t *ones, uint64_t *sums)
{
    /* A float from 0 to 2**22 plus this has the nearest integer in its low bits; greater ones stay greater. */
    const float magic = 12582912.0f;
    const int32_t zero = (int32_t)float_bits(magic);
    size_t counts[LEVELS + 1] = {0}, num_ones = 0; /* by level; the first is kept in a register, and so is its total */
    counters totals[LEVELS + 1] = {0}, total = {0};
    float padded[64] = {0};
    for (size_t start = 0; start < numel; start += 64) {
        const float *from = x + start;
        if (numel - start < 64)
            from = memcpy(padded, from, (numel - start) * sizeof *x);
        for (size_t line = 0; line < 64; line += 16)
            __builtin_prefetch(from + AHEAD + line);
        lanes scaled[8];
        int32_t below = thresholds[start / BLOCK] - 1;
        uint64_t mask = 0, negative = 0, above = 0;
        for (size_t half = 0; half < 8; half += 4) {
            lanes value[4], reached[4], higher[4];
            for (size_t group = 0; group < 4; group++) {
                value[group] = *(const packed *)(from + 8 * (half + group));
                lanes here = (lanes)((floats)(value[group] & 0x7fffffff) * inverse + magic) - zero;
                scaled[half + group] = here;
                reached[group] = here > below;
                higher[group] = here > below + UNITS;
                total += (counters)(here & reached[group]);
            }
            mask |= mask_of(reached) << 8 * half;
            negative |= mask_of(value) << 8 * half;
            above |= mask_of(higher) << 8 * half;
        }
        memcpy(planes + start / 8, &mask, sizeof mask);
        put_bits(signs, num_ones, pext(negative, mask));
        put_bits(planes + stride, num_ones, pext(above, mask));
        num_ones += (size_t)__builtin_popcountll(mask);
        for (size_t level = 2; above; level++) {
            mask = above;
            above = 0;
            below += UNITS;
            for (size_t half = 0; half < 8; half += 4) {
                lanes higher[4];
                for (size_t group = 0; group < 4; group++) {
                    lanes here = scaled[half + group];
                    totals[level] += (counters)(here & (here > below));
                    higher[group] = here > below + UNITS;
                }
                above |= mask_of(higher) << 8 * half;
            }
            if (level < LEVELS)
                put_bits(planes + level * stride, counts[level], pext(above, mask));
            counts[level] += (size_t)__builtin_popcountll(mask);
            if (level == LEVELS) {
                for (; mask; mask &= mask - 1)
                    *exact++ = from[__builtin_ctzll(mask)];
                break;
            }
        }
    }
    counts[1] = num_ones;
    totals[1] = total;
    for (size_t level = 1; level <= LEVELS; level++) {
        ones[level - 1] = (uint32_t)counts[level];
        /* A lane's total over all that reach a level is modulo 2**32; over those of one level below LEVELS it is less. */
        counters own = level < LEVELS ? totals[level] - totals[level + 1] : (counters){0};
        sums[level - 1] = 0;
        for (size_t lane = 0; lane < 8; lane++)
            sums[level - 1] += own[lane];
    }
}

/* The values of 64 elements: masks[0 .. depth] say which reach level 1, 2, ... */
static inline void look_up(const uint64_t *masks, size_t depth, uint64_t negative, const float *values, floats *decoded)
{
    const counters bits = {1, 2, 4, 8, 16, 32, 64, 128}, to_sign = {31, 30, 29, 28, 27, 26, 25, 24};
    for (size_t half = 0; half < 2; half++, decoded += 4) {
        for (size_t group = 0; group < 4; group++)
            decoded[group] = broadcast(values[0]);
        for (size_t level = 0; level <= depth; level++) {
            counters word = (counters){0} + (uint32_t)(masks[level] >> 32 * half);
            for (size_t group = 0; group < 4; group++) {
                counters bit = bits << 8 * (uint32_t)group;
                decoded[group] = choose((word & bit) == bit, broadcast(values[level + 1]), decoded[group]);
            }
        }
        counters signs = (counters){0} + (uint32_t)(negative >> 32 * half);
        for (size_t group = 0; group < 4; group++)
            decoded[group] = (floats)((counters)decoded[group] ^ (signs << (to_sign - 8 * (uint32_t)group) & 0x80000000u));
    }
}

static inline void expand(
    const uint8_t *planes, size_t stride, size_t num_planes, const uint8_t *signs, const float *exact, size_t num_exact,
    const float *values, float weight, size_t numel, int add, float *out)
{
    size_t places[LEVELS + 1] = {0}, first_place = 0, num_taken = 0; /* as in planes_quantise */
    for (size_t start = 0; start < numel; start += 64, out += 64) {
        uint64_t masks[LEVELS];
        masks[0] = 0;
        if (num_planes) /* else what lies there is of another section */
            memcpy(masks, planes + start / 8, sizeof *masks);
        uint64_t negative = pdep(bits_at(signs, first_place), masks[0]), mask = masks[0];
        size_t depth = 0, place = first_place;
        first_place += (size_t)__builtin_popcountll(mask);
        while (depth + 1 < num_planes) {
            mask = pdep(bits_at(planes + (depth + 1) * stride, place), mask);
            if (!mask)
                break;
            masks[++depth] = mask;
            place = places[depth];
            places[depth] += (size_t)__builtin_popcountll(mask);
        }
        floats decoded[8];
        if (depth)
            look_up(masks, depth, negative, values, decoded);
        else
            look_up(masks, 0, negative, values, decoded);
        if (depth + 1 == LEVELS)
            for (; mask; mask &= mask - 1, num_taken++) {
                unsigned at = (unsigned)__builtin_ctzll(mask);
                decoded[at / 8][at % 8] = num_taken < num_exact ? exact[num_taken] * weight : values[0];
            }
        if (numel - start < 64) {
            for (size_t i = 0; i < numel - start; i++)
                out[i] = add ? out[i] + decoded[i / 8][i % 8] : decoded[i / 8][i % 8];
            break;
        }
        for (size_t group = 0; group < 8; group++) {
            floats value = decoded[group], before;
            memcpy(&before, out + 8 * group, sizeof before);
            if (add)
                value = before + value;
            memcpy(out + 8 * group, &value, sizeof value);
        }
    }
}

void planes_expand(
    const uint8_t *planes, size_t stride, size_t num_planes, const uint8_t *signs, const float *exact, size_t num_exact,
    const float *values, float weight, size_t numel, int add, float *out)
{
    if (add)
        expand(planes, stride, num_planes, signs, exact, num_exact, values, weight, numel, 1, out);
    else
        expand(planes, stride, num_planes, signs, exact, num_exact, values, weight, numel, 0, out);
}

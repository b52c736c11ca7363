/* What _encode and _decode of bitmaps.py do with NumPy. */

#include "rans.h"

/* With these, eight states at a time are worth it; Zen 1 and 2 have pext and pdep, but in microcode. */
#if defined(__AVX2__) && defined(__BMI2__) && !defined(__znver1__) && !defined(__znver2__)
#include <immintrin.h>
#define VECTORS
#endif

enum { BLOCK = 512, LANES = 32 }; /* as in bitmaps.py */

static inline size_t block_length(size_t numel, size_t block)
{
    return numel - block * BLOCK < BLOCK ? numel - block * BLOCK : BLOCK;
}

/* Puts a byte with this share: how many slots it has, and 2**16 times the first of them. */
static inline uint8_t *put_share(uint32_t *state, uint32_t share, uint8_t *next)
{
    return put(state, share & 0xffff, share >> 16, next);
}

static inline uint8_t take(uint32_t *state, const uint8_t *slots, const uint32_t *shares)
{
    uint32_t slot = *state & SLOT;
    uint8_t byte = slots[slot];
    *state = (shares[byte] & 0xffff) * (*state >> PRECISION) + slot - (shares[byte] >> 16);
    return byte;
}

#ifdef VECTORS

static const uint64_t ASCENDING = 0x0706050403020100, EACH_BYTE = 0x0101010101010101;

/* Which lane comes where: `order` has a byte for each. */
static inline __m256i permute(__m256i values, uint64_t order)
{
    return _mm256_permutevar8x32_epi32(values, _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)order)));
}

static inline unsigned mask_of(__m256i which)
{
    return (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(which));
}

static inline uint8_t *put_eight(__m256i *states, const uint32_t *shares, uint8_t *next)
{
    __m256i state = *states, share = _mm256_loadu_si256((const __m256i *)shares);
    __m256i size = _mm256_and_si256(share, _mm256_set1_epi32(0xffff)), start = _mm256_srli_epi32(share, 16);
    __m256i room = _mm256_cmpgt_epi32(size, _mm256_srli_epi32(state, 17));
    unsigned full = ~mask_of(room) & 255, count = (unsigned)__builtin_popcount(full);
    /* The words of the full ones, in the last places. */
    uint64_t order = _pext_u64(ASCENDING, _pdep_u64(full, EACH_BYTE) * 255) << 4 * (8 - count) << 4 * (8 - count);
    __m256i words = _mm256_and_si256(permute(state, order), _mm256_set1_epi32(0xffff));
    words = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
    _mm_storeu_si128((__m128i *)(next - 16), _mm256_castsi256_si128(words));
    state = _mm256_blendv_epi8(_mm256_srli_epi32(state, 16), state, room);
    /* The quotient is below 2**17: too large by one at most, or too small. */
    __m256 ratio = _mm256_div_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(state, 1)), _mm256_cvtepi32_ps(size));
    __m256i quotient = _mm256_cvttps_epi32(_mm256_add_ps(ratio, ratio));
    __m256i rest = _mm256_sub_epi32(state, _mm256_mullo_epi32(quotient, size));
    __m256i under = _mm256_srai_epi32(rest, 31), over = _mm256_cmpgt_epi32(rest, _mm256_sub_epi32(size, _mm256_set1_epi32(1)));
    quotient = _mm256_sub_epi32(_mm256_add_epi32(quotient, under), over);
    __m256i fix = _mm256_sub_epi32(_mm256_and_si256(under, size), _mm256_and_si256(over, size));
    rest = _mm256_add_epi32(_mm256_add_epi32(rest, fix), start);
    *states = _mm256_add_epi32(_mm256_slli_epi32(quotient, PRECISION), rest);
    return next - 2 * count;
}

static inline const uint8_t *take_eight(__m256i *states, uint8_t *bytes, const uint8_t *slots, const uint32_t *shares, const uint8_t *next)
{
    __m256i state = *states, slot = _mm256_and_si256(state, _mm256_set1_epi32(SLOT));
    __m256i byte = _mm256_and_si256(_mm256_i32gather_epi32((const int *)slots, slot, 1), _mm256_set1_epi32(255));
    __m256i share = _mm256_i32gather_epi32((const int *)shares, byte, 4);
    __m256i size = _mm256_and_si256(share, _mm256_set1_epi32(0xffff)), start = _mm256_srli_epi32(share, 16);
    state = _mm256_mullo_epi32(size, _mm256_srli_epi32(state, PRECISION));
    state = _mm256_add_epi32(state, _mm256_sub_epi32(slot, start));
    __m256i low = _mm256_cmpeq_epi32(_mm256_srli_epi32(state, 16), _mm256_setzero_si256());
    unsigned lacking = mask_of(low);
    __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)next));
    words = permute(words, _pdep_u64(ASCENDING, _pdep_u64(lacking, EACH_BYTE) * 255));
    *states = _mm256_blendv_epi8(state, _mm256_or_si256(_mm256_slli_epi32(state, 16), words), low);
    byte = _mm256_packus_epi32(byte, byte);
    byte = _mm256_permute4x64_epi64(_mm256_packus_epi16(byte, byte), 0x08);
    byte = _mm256_shuffle_epi32(byte, 0x08);
    _mm_storel_epi64((__m128i *)bytes, _mm256_castsi256_si128(byte));
    return next + 2 * __builtin_popcount(lacking);
}

#endif

/* Puts `length` bytes, whole turns of all states. Local copies of these tell the compiler that no bytes written are theirs. */
static inline uint8_t *put_turns(uint32_t *states, const uint8_t *bytes, size_t length, const uint32_t *shares, uint8_t *next)
{
    uint32_t share[BLOCK];
    for (size_t i = 0; i < length; i++)
        share[i] = shares[bytes[i]];
#ifdef VECTORS
    __m256i local[LANES / 8];
    memcpy(local, states, sizeof local);
    for (size_t i = length; i; i -= LANES)
        for (size_t lane = LANES; lane; lane -= 8)
            next = put_eight(&local[lane / 8 - 1], share + i - LANES + lane - 8, next);
#else
    uint32_t local[LANES];
    memcpy(local, states, sizeof local);
    for (size_t i = length; i; i -= LANES)
        for (size_t lane = LANES; lane-- > 0;)
            next = put_share(&local[lane], share[i - LANES + lane], next);
#endif
    memcpy(states, local, sizeof local);
    return next;
}

/* Takes whole turns of bytes, `length` at most, for as long as their words are sure to be there. Returns how many. */
static inline size_t take_turns(
    uint32_t *states, uint8_t *bytes, size_t length, const uint8_t *slots, const uint32_t *shares, const uint8_t **from, const uint8_t *end)
{
    const uint8_t *next = *from;
    size_t i = 0;
#ifdef VECTORS
    __m256i local[LANES / 8];
    memcpy(local, states, sizeof local);
    for (; i + LANES <= length && end - next >= 2 * LANES; i += LANES)
        for (size_t lane = 0; lane < LANES; lane += 8)
            next = take_eight(&local[lane / 8], bytes + i + lane, slots, shares, next);
#else
    uint32_t local[LANES];
    memcpy(local, states, sizeof local);
    for (; i + LANES <= length && end - next >= 2 * LANES; i += LANES)
        for (size_t lane = 0; lane < LANES; lane++) {
            bytes[i + lane] = take(&local[lane], slots, shares);
            uint16_t word;
            memcpy(&word, next, 2);
            int low = local[lane] < LOWEST;
            local[lane] = low ? local[lane] << 16 | word : local[lane];
            next += 2 * low;
        }
#endif
    memcpy(states, local, sizeof local);
    *from = next;
    return i;
}

static inline uint8_t level_of_block(const uint8_t *bytes, size_t length, const uint8_t *level_of)
{
    size_t ones = 0, i = 0;
    for (; i + 8 <= length; i += 8) {
        uint64_t word;
        memcpy(&word, bytes + i, sizeof word);
        ones += (size_t)__builtin_popcountll(word);
    }
    for (; i < length; i++)
        ones += (size_t)__builtin_popcount(bytes[i]);
    size_t scaled = (ones * BLOCK + length / 2) / length;
    return level_of[scaled ? scaled : ones > 0];
}

/* Writes levels forwards, and the stream backwards from `end`: at least 16 bytes more than the longest there can be. */
void bitmaps_encode(
    const uint8_t *maps, size_t stride, const size_t *lengths, size_t num_maps, const uint8_t *level_of, const uint32_t (*shares)[256],
    uint8_t *levels, uint8_t *end, size_t *nbytes)
{
    uint32_t states[LANES];
    uint8_t *next = end;
    for (size_t lane = 0; lane < LANES; lane++)
        states[lane] = LOWEST;
    for (size_t map = 0; map < num_maps; map++)
        for (size_t block = 0; block * BLOCK < lengths[map]; block++)
            *levels++ = level_of_block(maps + map * stride + block * BLOCK, block_length(lengths[map], block), level_of);
    for (size_t map = num_maps; map-- > 0;)
        for (size_t block = (lengths[map] + BLOCK - 1) / BLOCK; block-- > 0;) {
            if (!*--levels)
                continue;
            const uint8_t *bytes = maps + map * stride + block * BLOCK;
            const uint32_t *share = shares[*levels];
            size_t i = block_length(lengths[map], block);
            while (i % LANES) {
                i--;
                next = put_share(&states[i % LANES], share[bytes[i]], next);
            }
            next = put_turns(states, bytes, i, share, next);
        }
    next -= sizeof states;
    memcpy(next, states, sizeof states);
    *nbytes = (size_t)(end - next);
}

void bitmaps_decode(
    const uint8_t *stream, size_t nbytes, const uint8_t *levels, const uint32_t (*shares)[256], const uint8_t (*slots)[1 << PRECISION],
    uint8_t *maps, size_t stride, const size_t *lengths, size_t num_maps)
{
    uint32_t states[LANES];
    const uint8_t *next = stream + sizeof states, *end = stream + nbytes;
    memcpy(states, stream, sizeof states);
    for (size_t map = 0; map < num_maps; map++)
        for (size_t block = 0; block * BLOCK < lengths[map]; block++, levels++) {
            uint8_t *bytes = maps + map * stride + block * BLOCK;
            size_t length = block_length(lengths[map], block);
            if (!*levels) {
                memset(bytes, 0, length);
                continue;
            }
            const uint32_t *share = shares[*levels];
            const uint8_t *slot = slots[*levels];
            for (size_t i = take_turns(states, bytes, length, slot, share, &next, end); i < length; i++) {
                uint32_t *state = &states[i % LANES];
                bytes[i] = take(state, slot, share);
                if (*state < LOWEST)
                    *state = refilled(*state, &next, end);
            }
        }
}

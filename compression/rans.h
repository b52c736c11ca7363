/* A state of an asymmetric numeral system (J. Duda, arXiv 1311.2540) with 16-bit words and 2**PRECISION slots. */

#ifndef FARFLUNG_RANS_H
#define FARFLUNG_RANS_H

#include "kernels.h"

enum { PRECISION = 15 };

#define LOWEST (1u << 16) /* of a state between symbols */
#define SLOT ((1u << PRECISION) - 1)

/* Puts a symbol that has `size` slots from `start` on into the state, and returns where the next word ends. */
static inline uint8_t *put(uint32_t *state, uint32_t size, uint32_t start, uint8_t *next)
{
    if (*state >> 17 >= size) {
        uint16_t word = (uint16_t)*state;
        next -= 2;
        memcpy(next, &word, 2);
        *state >>= 16;
    }
    *state += *state / size * ((1u << PRECISION) - size) + start;
    return next;
}

/* A state that is too low, with the next word of the stream, as if zeros followed its end. */
static inline uint32_t refilled(uint32_t state, const uint8_t **next, const uint8_t *end)
{
    uint16_t word = 0;
    if (end - *next >= 2) {
        memcpy(&word, *next, 2);
        *next += 2;
    }
    return state << 16 | word;
}

#endif

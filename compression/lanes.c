/* What _encode and _decode of lanes.py do with NumPy: a step is one decision of each of the eight lanes that have one to make. */

#include "rans.h"
#include "trellis.h"

enum { FINE = 24, RATE = 8, LEAST = 8 }; /* as in lanes.py */

typedef struct {
    lanes chances[LEVELS + 1]; /* by context: of a one, in 2**-FINE */
    lanes adapts;
} model;

static inline model begin(const uint16_t *shares, unsigned planes, int adapts)
{
    model m;
    for (unsigned context = 0; context <= LEVELS; context++)
        m.chances[context] = (lanes){0} + (context <= planes ? shares[context] << (FINE - PRECISION) : 0);
    m.adapts = (lanes){0} - (adapts != 0);
    return m;
}

/* Of a yes to the question of a plane, of 2**PRECISION slots; `second` are the lanes that have the second quantiser. */
static inline lanes share_of(const model *m, unsigned plane, lanes second)
{
    lanes chance = plane == 1 ? choose_lanes(second, m->chances[1], m->chances[0]) : m->chances[plane];
    lanes share = chance >> (FINE - PRECISION), least = (lanes){0} + LEAST, most = (lanes){0} + ((1 << PRECISION) - LEAST);
    return choose_lanes(share < least, least, choose_lanes(share > most, most, share));
}

static inline void move(lanes *chance, lanes which, lanes ones)
{
    *chance += (((ones & (1 << FINE)) - *chance) >> RATE) & which;
}

/* What the active lanes have answered. */
static inline void tell(model *m, unsigned plane, lanes second, lanes active, lanes ones)
{
    active &= m->adapts;
    if (plane == 1) {
        move(&m->chances[0], active & ~second, ones);
        move(&m->chances[1], active & second, ones);
    } else
        move(&m->chances[plane], active, ones);
}

static inline int any(lanes which)
{
    return memcmp(&which, &(lanes){0}, sizeof which) != 0;
}

/* `notes` has room for eight numbers of each step; the stream is written backwards from `end`. */
void lanes_encode(
    const uint8_t *cells, size_t numel, unsigned planes, const uint16_t *shares, int adapts, uint16_t *notes, uint8_t *end, size_t *nbytes)
{
    model m = begin(shares, planes, adapts);
    const lanes number = {0, 1, 2, 3, 4, 5, 6, 7};
    uint16_t *note = notes;
    for (size_t i = 0; i < numel; i += LANES) {
        uint8_t padded[LANES] = {0};
        memcpy(padded, cells + i, numel - i < LANES ? numel - i : LANES);
        lanes cell = {padded[0], padded[1], padded[2], padded[3], padded[4], padded[5], padded[6], padded[7]};
        lanes level = cell & LEVEL, second = cell >> QUANTISER > 0, active = number < (int32_t)(numel - i < LANES ? numel - i : LANES);
        for (unsigned plane = 1; plane <= planes && any(active); plane++) {
            lanes ones = (level >= (int32_t)plane) & active, told = (share_of(&m, plane, second) | (ones & 1 << PRECISION)) & active;
            for (size_t lane = 0; lane < LANES; lane++)
                *note++ = (uint16_t)told[lane];
            tell(&m, plane, second, active, ones);
            active = ones;
        }
    }
    uint32_t states[LANES];
    for (size_t lane = 0; lane < LANES; lane++)
        states[lane] = LOWEST;
    uint8_t *next = end;
    while (note > notes) {
        note -= LANES;
        for (size_t lane = LANES; lane-- > 0;)
            if (note[lane]) {
                uint32_t share = note[lane] & SLOT, one = note[lane] >> PRECISION;
                next = put(&states[lane], one ? share : (1u << PRECISION) - share, one ? 0 : share, next);
            }
    }
    next -= sizeof states;
    memcpy(next, states, sizeof states);
    *nbytes = (size_t)(end - next);
}

void lanes_decode(const uint8_t *stream, size_t nbytes, size_t numel, unsigned planes, const uint16_t *shares, int adapts, uint8_t *cells)
{
    model m = begin(shares, planes, adapts);
    const lanes number = {0, 1, 2, 3, 4, 5, 6, 7};
    typedef uint32_t states_of __attribute__((vector_size(32)));
    states_of states;
    memcpy(&states, stream, sizeof states);
    const uint8_t *next = stream + sizeof states, *end = stream + nbytes;
    uint8_t places[LANES] = {0}; /* in the trellis */
    for (size_t i = 0; i < numel; i += LANES) {
        size_t here = numel - i < LANES ? numel - i : LANES;
        lanes level = {0}, second, active = number < (int32_t)here;
        for (size_t lane = 0; lane < LANES; lane++)
            second[lane] = -(places[lane] & 1);
        for (unsigned plane = 1; plane <= planes && any(active); plane++) {
            lanes share = share_of(&m, plane, second), slot = (lanes)(states & SLOT), ones = (slot < share) & active;
            lanes size = choose_lanes(ones, share, (1 << PRECISION) - share);
            states_of after = (states_of)size * (states >> PRECISION) + (states_of)(slot - (~ones & share));
            states = (states_of)choose_lanes(active, (lanes)after, (lanes)states);
            lanes low = ((lanes)(states >> 16) == 0) & active;
            if (any(low))
                for (size_t lane = 0; lane < LANES; lane++)
                    if (low[lane])
                        states[lane] = refilled(states[lane], &next, end);
            tell(&m, plane, second, active, ones);
            level -= ones;
            active = ones;
        }
        for (size_t lane = 0; lane < here; lane++) {
            cells[i + lane] = (uint8_t)(level[lane] | (places[lane] & 1) << QUANTISER);
            places[lane] = NEXT[places[lane]][level[lane] & 1];
        }
        if (i / LANES % TURNS == TURNS - 1)
            memset(places, 0, sizeof places);
    }
}

/* What search, sums and expand of paths.py do with NumPy: eight lanes at a time, the states one after another. */

#include "trellis.h"

/* By state: from which two it is reached, and by a level of which parity. */
static const uint8_t FROM[STATES][2] = {{0, 4}, {2, 6}, {0, 4}, {2, 6}, {3, 5}, {1, 7}, {3, 5}, {1, 7}};
static const uint8_t ODD[STATES][2] = {{0, 1}, {0, 1}, {1, 0}, {1, 0}, {1, 0}, {0, 1}, {0, 1}, {1, 0}};

static inline floats smaller(floats a, floats b)
{
    return choose(a < b, a, b);
}

static inline floats larger(floats a, floats b)
{
    return choose(a > b, a, b);
}

/* Levels as integers: adding this leaves no room below the units, and the last bits are the number. */
static inline lanes whole(floats level)
{
    return (lanes)(level + broadcast(12582912.0f)) & LEVEL;
}

/* The cost of the nearest level of one parity, `lowest` or two, four, ... more, and which one that is. */
static inline floats cost_of(
    floats magnitude, float quantiser, float lowest, float highest, const float *shifts, float price, float slope, floats *level)
{
    const floats magic = broadcast(12582912.0f); /* adding it leaves no room below the units */
    floats steps = (magnitude + broadcast(quantiser - 2.0f * lowest)) * broadcast(0.25f);
    steps = larger(steps + magic - magic, broadcast(0.0f));
    floats nearest = smaller(broadcast(lowest) + steps * broadcast(2.0f), broadcast(highest));
    floats shift = choose(nearest == broadcast(1.0f), broadcast(shifts[0]), choose(nearest == broadcast(2.0f), broadcast(shifts[1]), broadcast(shifts[2])));
    floats error = magnitude - (nearest * broadcast(2.0f) - broadcast(quantiser) + shift);
    *level = nearest;
    return error * error + (broadcast(price) + (nearest - broadcast(1.0f)) * broadcast(slope));
}

/* `prices` are what Prices of paths.py has: shifts [2][3], of zeros [2], of ones [2], slope, of an exact one. */
void paths_search(const float *x, size_t numel, float inverse, const float *prices, uint8_t *cells)
{
    const float *zeros = prices + 6, *ones = prices + 8, slope = prices[10], exact = prices[11];
    lanes notes[TURNS];
    for (; numel; x += TURNS * LANES, cells += TURNS * LANES) {
        size_t here = numel < TURNS * LANES ? numel : TURNS * LANES, turns = (here + LANES - 1) / LANES;
        floats totals[STATES];
        for (size_t state = 0; state < STATES; state++)
            totals[state] = broadcast(state ? 1e6f : 0.0f);
        for (size_t turn = 0; turn < turns; turn++) {
            floats magnitude = {0};
            memcpy(&magnitude, x + turn * LANES, (here - turn * LANES < LANES ? here - turn * LANES : LANES) * sizeof *x);
            magnitude = (floats)((lanes)magnitude & 0x7fffffff) * broadcast(inverse);
            magnitude = smaller(magnitude, broadcast(4.0f * LEVELS)); /* what is beyond is exact in either case */
            floats costs[2][2], square = magnitude * magnitude;
            lanes note = {0};
            for (size_t quantiser = 0; quantiser < 2; quantiser++) {
                const float *shifts = prices + 3 * quantiser;
                floats even, odd, cost;
                costs[quantiser][1] = cost_of(magnitude, (float)quantiser, 1, LEVELS - 1, shifts, ones[quantiser], slope, &odd);
                cost = cost_of(magnitude, (float)quantiser, 2, LEVELS, shifts, ones[quantiser], slope, &even);
                cost = choose(even == broadcast(LEVELS), broadcast(ones[quantiser] + exact), cost);
                floats nothing = square + broadcast(zeros[quantiser]);
                lanes zero = nothing <= cost;
                costs[quantiser][0] = choose(zero, nothing, cost);
                even = choose(zero, broadcast(0.0f), even);
                note |= whole(even) << (8 + 10 * (int)quantiser);
                note |= whole(odd) << (13 + 10 * (int)quantiser);
            }
            floats now[STATES];
            for (size_t state = 0; state < STATES; state++) {
                floats first = totals[FROM[state][0]] + costs[FROM[state][0] & 1][ODD[state][0]];
                floats second = totals[FROM[state][1]] + costs[FROM[state][1] & 1][ODD[state][1]];
                lanes better = second < first;
                now[state] = choose(better, second, first);
                note |= better & (1 << state);
            }
            notes[turn] = note;
            memcpy(totals, now, sizeof totals);
        }
        for (size_t lane = 0; lane < LANES; lane++) {
            unsigned state = 0;
            for (unsigned other = 1; other < STATES; other++)
                state = totals[other][lane] < totals[state][lane] ? other : state;
            for (size_t turn = turns; turn-- > 0;) {
                uint32_t note = (uint32_t)notes[turn][lane];
                unsigned which = note >> state & 1, odd = ODD[state][which];
                state = FROM[state][which];
                if (turn * LANES + lane < here)
                    cells[turn * LANES + lane] = (uint8_t)((note >> (8 + 10 * (state & 1) + 5 * odd) & LEVEL) | (state & 1) << QUANTISER);
            }
        }
        numel -= here;
    }
}

/* For each cell there may be, how many elements have it, and above level 0 the sum of their magnitudes, in order. */
void paths_sums(const uint8_t *cells, const float *x, size_t numel, int64_t *counts, double *sums)
{
    for (size_t i = 0; i < numel; i++) {
        counts[cells[i]]++;
        if (cells[i] & LEVEL)
            sums[cells[i]] += bits_float(float_bits(x[i]) & 0x7fffffff);
    }
}

/* `values` has one for each cell there may be. Nothing is read beyond the last sign and the last exact value. */
void paths_expand(
    const uint8_t *cells, size_t numel, const uint8_t *signs, size_t num_signs, const float *exact, size_t num_exact, const float *values,
    float weight, int add, float *out)
{
    size_t place = 0, taken = 0;
    for (size_t i = 0; i < numel; i++) {
        unsigned level = cells[i] & LEVEL, told = level && place < num_signs;
        uint32_t sign = told ? (uint32_t)(signs[place / 8] >> place % 8 & 1) << 31 : 0;
        place += told;
        float value = bits_float(float_bits(values[cells[i]]) ^ sign);
        if (level == LEVELS)
            value = taken < num_exact ? exact[taken++] * weight : 0.0f;
        out[i] = add ? out[i] + value : value;
    }
}

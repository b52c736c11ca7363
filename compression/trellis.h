/* The trellis of paths.c and lanes.c, as in paths.py: which state an even or odd level leads to. A state's last bit is its quantiser. */

#ifndef FARFLUNG_TRELLIS_H
#define FARFLUNG_TRELLIS_H

#include "vectors.h"

enum { LANES = 8, TURNS = 512, LEVELS = 24, STATES = 8, LEVEL = 31, QUANTISER = 7 }; /* as in paths.py */

static const uint8_t NEXT[STATES][2] = {{0, 2}, {5, 7}, {1, 3}, {6, 4}, {2, 0}, {4, 6}, {3, 1}, {7, 5}};

#endif

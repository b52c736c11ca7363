/* What OuterState.step_ of outer.py does, with the same operations on each element, in one pass over memory. */

#include "../compression/kernels.h"

void outer_step(float *restrict params, float *restrict momentum, const float *restrict mean, size_t numel, float lr, float mu)
{
    for (size_t i = 0; i < numel; i++) {
        float velocity = momentum[i] * mu + mean[i];
        momentum[i] = velocity;
        params[i] -= (velocity * mu + mean[i]) * lr;
    }
}

/* What Makespan._seconds of pipeline_makespan.py does, with the same operations on doubles in the same order. */

#include <math.h>
#include <stdint.h>

/* (a, lane) before (b, other): ties in time go to the lower lane. */
static inline int before(const double *arrival, int32_t a, int32_t b)
{
    return arrival[a] < arrival[b] || (arrival[a] == arrival[b] && a < b);
}

static void sift_down(const double *arrival, int32_t *heap, int64_t size)
{
    int32_t moved = heap[0];
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && before(arrival, heap[child + 1], heap[child]))
            child++;
        if (!before(arrival, heap[child], moved))
            break;
        heap[at] = heap[child];
    }
    heap[at] = moved;
}

/* Where step `at` of a route happens, and what it takes: forwards, loss, backwards. */
static inline int32_t place_of(const int32_t *route, int64_t hops, int64_t at)
{
    return at < hops ? route[at] : at == hops ? route[0] : route[2 * hops - at];
}

static inline double seconds_of(const double *forward, int32_t place, int64_t hops, int64_t at, double backward, double loss)
{
    return at < hops ? forward[place] : at == hops ? loss * forward[place] : backward * forward[place];
}

void pipeline_makespan(
    int64_t lanes, int64_t hops, int64_t peers,
    const int32_t *routes,   /* [lanes][hops]: stage * peers + peer */
    const int32_t *counts,   /* [lanes]: microbatches, at least 1 */
    const double *forward,   /* [stages][peers] seconds */
    const double *transmit,  /* [peers][peers] seconds */
    const double *latency,   /* [peers][peers] seconds */
    double backward, double loss, double pause, int64_t shared,
    double *work,            /* [2 * peers + lanes + lanes * (2 * hops + 1)] */
    int32_t *places,         /* [3 * lanes] */
    double *result,          /* [1]: seconds, infinity when over the limit */
    double limit)
{
    double *free_at = work, *uplink = work + peers, *arrival = uplink + peers, *rest = arrival + lanes;
    int32_t *heap = places, *step = places + lanes, *left = step + lanes;
    int64_t last = 2 * hops;
    double stop = limit + 1e-9 * limit, end = 0.0;
    for (int64_t peer = 0; peer < peers; peer++)
        free_at[peer] = uplink[peer] = 0.0;
    for (int64_t lane = 0; lane < lanes; lane++) {
        const int32_t *route = routes + lane * hops;
        double *after = rest + lane * (last + 1), sum = 0.0;
        arrival[lane] = 0.0;
        heap[lane] = (int32_t)lane;
        step[lane] = 0;
        left[lane] = counts[lane];
        after[last] = 0.0;
        for (int64_t at = last - 1; at >= 0; at--) {
            int32_t next = place_of(route, hops, at + 1);
            int64_t sender = place_of(route, hops, at) % peers, receiver = next % peers;
            double message = sender == receiver ? 0.0 : transmit[sender * peers + receiver] + latency[sender * peers + receiver];
            sum += seconds_of(forward, next, hops, at + 1, backward, loss) + message;
            after[at] = sum;
        }
    }
    while (arrival[heap[0]] < INFINITY) {
        int32_t lane = heap[0];
        const int32_t *route = routes + lane * hops;
        const double *after = rest + lane * (last + 1);
        int64_t at = step[lane];
        int32_t place = place_of(route, hops, at);
        int64_t peer = place % peers;
        double now = (arrival[lane] > free_at[peer] ? arrival[lane] : free_at[peer]) + seconds_of(forward, place, hops, at, backward, loss);
        double round = forward[route[0]] + after[0];
        if (now + after[at] + (left[lane] - 1) * round > stop) {
            *result = INFINITY;
            return;
        }
        free_at[peer] = now + pause;
        if (at == last) {
            step[lane] = 0;
            left[lane]--;
            if (now > end)
                end = now;
            arrival[lane] = left[lane] ? now : INFINITY;
        } else {
            int64_t receiver = place_of(route, hops, at + 1) % peers;
            step[lane]++;
            arrival[lane] = now;
            if (receiver != peer) {
                double leaves = shared && uplink[peer] > now ? uplink[peer] : now;
                uplink[peer] = leaves + transmit[peer * peers + receiver];
                arrival[lane] = uplink[peer] + latency[peer * peers + receiver];
            }
        }
        sift_down(arrival, heap, lanes);
    }
    *result = end <= limit ? end : INFINITY;
}

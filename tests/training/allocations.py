"""What torch's allocator recorded."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """Most bytes that were allocated on the CPU beyond those at the beginning."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak

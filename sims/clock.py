"""Virtual time for asyncio: a loop whose clock jumps to the next timer whenever nothing is ready.

An hour of timeouts takes milliseconds, and the same program takes the same steps every time. The idea is trio's
`MockClock(autojump_threshold=0)`, the total order of events is SimPy's: timers are kept as (when, number), so
those due at the same instant run in the order in which they were set. (asyncio's own heap compares `when` alone
and its selector loop rounds to the clock's resolution, so there ties and near-ties have no defined order.)

What else would differ between two runs is closed off or made deterministic here:

- `TaskGroup` and `asyncio.wait` keep tasks in sets, which iterate by hash, by default the address in memory. Tasks of this
  loop hash to their number, so a group cancels its children in the same order each time.
- threads are refused, and so are sockets and signals, which `BaseEventLoop` does not implement.
- an exception that nobody would see but a log (in a callback, or in a task nobody awaits) ends the run.

Nothing ready and no timer left is a `Deadlock`, which names the tasks and where they wait. A task that spins on `sleep(0)`
holds virtual time still, which asyncio would not notice: a `Livelock`.

`freeze` stops a process the way SIGSTOP does: callbacks of its tasks wait, timers included, until `thaw`.
Trade-off: computing takes no virtual time unless the program sleeps for it. One `sleep` costs some 7 us of real time.
"""

import asyncio
import contextlib
import contextvars
import gc
import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterator
from concurrent.futures import Executor
from itertools import count
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_PASSES_PER_INSTANT = 1_000_000
"""Passes of the loop without a step of the clock before it is a livelock: a few seconds of real time. A broadcast is
one or two passes however many peers it reaches, so honest programs stay far below."""

COLLECT_AT = 50_000
"""Objects that are new when the garbage collector looks at them; 700 as a rule."""

_MIN_CANCELLED_TIMERS = 256
"""Cancelled timers kept before the heap is rebuilt; every `asyncio.timeout` leaves one."""

_PROCESS: contextvars.ContextVar[Hashable] = contextvars.ContextVar("farflung_simulated_process")


class ClockError(RuntimeError):
    """The simulation cannot go on."""


class Deadlock(ClockError):
    """Nothing is ready and no timer is set. `tasks` says for each pending task what it is and where it waits."""

    def __init__(self, now: float, tasks: list[str]) -> None:
        lines = "".join(f"\n  {task}" for task in tasks)
        super().__init__(f"nothing can ever happen after {now:.6f} s; {len(tasks)} tasks wait:{lines}")
        self.tasks = tasks


class Livelock(ClockError):
    """Callbacks keep each other busy and the clock never moves."""


class CallbackFailed(ClockError):
    """A callback raised, or a task failed that nobody awaits; the cause is chained."""


class ThreadsRefused(ClockError):
    """Something wants a thread, whose timing no virtual clock can order."""


class _Task(asyncio.Task[T]):
    """A task whose hash is its number in its loop, so that sets of tasks iterate alike in every run."""

    def __init__(self, coro: Any, *, order: int, **kwargs: Any) -> None:
        self.order = order  # before super(): registering the task needs its hash
        super().__init__(coro, **kwargs)

    def __hash__(self) -> int:
        return self.order


class _Handle(asyncio.Handle):
    """A handle without what asyncio keeps for debugging: made more often than anything else."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: "VirtualLoop", context: contextvars.Context | None) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    """The same with a time. `asyncio.sleep` cancels its own when it has fired, which the loop need not know."""

    __slots__ = ()

    def __init__(
        self, when: float, callback: Any, args: Any, loop: "VirtualLoop", context: contextvars.Context | None
    ) -> None:
        self._context = contextvars.copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = True

    def cancel(self) -> None:
        if self._cancelled:
            return
        self._cancelled = True
        self._callback, self._args = None, ()
        if self._scheduled:
            self._loop._timer_handle_cancelled(self)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop under a virtual clock that begins at `start` seconds (unix time, if the program stamps with it)."""

    # What we use of the base class beside its public methods; unchanged from Python 3.4 to 3.14.
    _ready: deque[asyncio.Handle]
    _stopping: bool
    _closed: bool

    def __init__(self, *, start: float = 0.0) -> None:
        super().__init__()
        self._now = start
        self._timers: list[tuple[float, int, _Timer]] = []
        self._num_cancelled = 0
        self._timer_numbers = count()
        self._task_numbers = count()
        self._passes = 0
        self._failure: CallbackFailed | None = None
        self._frozen: dict[Hashable, list[asyncio.Handle]] = {}
        self._own_thread = threading.get_ident()
        self.set_task_factory(self._make_task)

    # --- the clock ---

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """As asyncio's, with ties in the order of the calls. Raises ValueError when `when` is not a number."""
        if self._closed:
            raise RuntimeError("Event loop is closed")
        if when != when:
            raise ValueError("a timer at NaN seconds")
        timer = _Timer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._timer_numbers), timer))
        return timer

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As asyncio's."""
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self._num_cancelled += 1
        if self._num_cancelled > max(_MIN_CANCELLED_TIMERS, len(self._timers) // 2):
            self._timers = [entry for entry in self._timers if not entry[2].cancelled()]
            heapq.heapify(self._timers)
            self._num_cancelled = 0

    def _run_once(self) -> None:
        """One pass: step the clock if nothing is ready, then run what was ready, and no more."""
        if self._ready or self._stopping:
            self._passes += 1
            if self._passes > MAX_PASSES_PER_INSTANT:
                self._passes = 0  # so that what runs can still be cancelled
                raise Livelock(f"the clock stands at {self._now:.6f} s: {self._describe(self._ready)}")
        else:
            self._step()
        ready, timers = self._ready, self._timers
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            if self._frozen and (backlog := self._frozen.get(_process_of(handle))) is not None:
                backlog.append(handle)
            else:
                handle._run()
        if self._failure is not None:
            self.raise_failure()

    def _step(self) -> None:
        while self._timers and self._timers[0][2]._cancelled:
            heapq.heappop(self._timers)
        if not self._timers or math.isinf(self._timers[0][0]):
            raise Deadlock(self._now, [describe_task(task) for task in self.pending_tasks()])
        self._now = max(self._now, self._timers[0][0])
        self._passes = 0

    @staticmethod
    def _describe(handles: deque[asyncio.Handle]) -> str:
        return "; ".join(repr(handle) for handle in list(handles)[:4])

    # --- tasks ---

    def _make_task(self, loop: Any, coro: Any, **kwargs: Any) -> _Task[Any]:
        return _Task(coro, order=next(self._task_numbers), loop=self, **kwargs)

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        """Tasks that are not done, oldest first."""
        return sorted(asyncio.all_tasks(self), key=hash)

    # --- errors ---

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep the first error that asyncio would only log; the pass that caused it raises `CallbackFailed`."""
        if self.is_closed():
            super().default_exception_handler(context)
        elif self._failure is None:
            self._failure = CallbackFailed(f"at {self._now:.6f} s: {context['message']}")
            self._failure.__cause__ = context.get("exception")

    def raise_failure(self) -> None:
        """Raise what was kept by the exception handler, once."""
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    # --- what would let the outside in ---

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Refused, and with it `asyncio.to_thread` and name resolution. Raises ThreadsRefused."""
        raise ThreadsRefused(
            f"{getattr(func, '__qualname__', func)!r} wants a thread, but under the virtual clock nothing may run beside "
            "the loop: call it in the loop, and sleep for the time it should take"
        )

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As `call_soon`, from the loop's own thread only. Raises ThreadsRefused."""
        if threading.get_ident() != self._own_thread:
            raise ThreadsRefused("a callback from another thread: its order would differ from run to run")
        return self.call_soon(callback, *args, context=context)

    # --- stopping a process ---

    def freeze(self, process: Hashable) -> None:
        """Hold back every callback of tasks and timers that belong to `process`, from the next one on."""
        self._frozen.setdefault(process, [])

    def thaw(self, process: Hashable) -> None:
        """Let the process go on: what was held back runs now, in its order; overdue timers fire at once."""
        self._ready.extend(self._frozen.pop(process, ()))

    def thaw_all(self) -> None:
        """Let all go on."""
        for process in list(self._frozen):
            self.thaw(process)


def process_context(process: Hashable) -> contextvars.Context:
    """A context for `create_task(..., context=)`: its task, and all that this starts, belong to `process`."""
    context = contextvars.copy_context()
    context.run(_PROCESS.set, process)
    return context


def _process_of(handle: asyncio.Handle) -> Hashable:
    # Handle.get_context() exists from 3.12 on; the attribute is there in all versions.
    context: contextvars.Context = handle._context  # type: ignore[attr-defined]
    return context.get(_PROCESS, None)


def describe_task(task: asyncio.Task[Any]) -> str:
    """Name of a task and the innermost line it waits at."""
    waits: Any = task.get_coro()
    frame = None
    while waits is not None:
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "gi_frame", None) or frame
        waits = getattr(waits, "cr_await", None) or getattr(waits, "gi_yieldfrom", None)
    if frame is None:
        return task.get_name()
    code = frame.f_code
    file = "/".join(code.co_filename.replace("\\", "/").split("/")[-2:])
    return f"{task.get_name()} in {code.co_qualname} ({file}:{frame.f_lineno})"


def run(main: Coroutine[Any, Any, T], *, start: float = 0.0) -> T:
    """Run `main` to its end under a virtual clock that begins at `start` seconds, and return its result.

    Then cancels what is left, oldest task first, and closes the loop. Raises what `main` raises, `Deadlock`,
    `Livelock`, or `CallbackFailed` for an error nobody else would see, those of left-over tasks included.
    """
    loop = VirtualLoop(start=start)
    with _rarely_collected(), contextlib.closing(loop):
        try:
            result = loop.run_until_complete(main)
        except BaseException:
            with contextlib.suppress(ClockError):  # follows from what is raised, or is seen when that is mended
                _wind_up(loop)
            raise
        failure = _wind_up(loop)
        if failure is not None:
            raise failure
        return result


@contextlib.contextmanager
def _rarely_collected() -> Iterator[None]:
    """Garbage of circles is looked for less often, and not among what is here already, modules and all. With a hundred nodes in one process, whose objects live long, that
    took a seventh of the time. What was frozen before a run is not any more after it."""
    usual = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(COLLECT_AT, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
        gc.unfreeze()


def _wind_up(loop: VirtualLoop) -> CallbackFailed | None:
    """End what is left, all of it, whoever raises meanwhile. Returns the first failure."""
    loop.thaw_all()  # who stands still cannot end
    failures = []
    while True:
        try:
            loop.run_until_complete(_cancel_rest(loop))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.raise_failure()
        except CallbackFailed as error:
            failures.append(error)
        else:
            return failures[0] if failures else None


async def _cancel_rest(loop: VirtualLoop) -> None:
    rest = [task for task in loop.pending_tasks() if task is not asyncio.current_task()]
    for task in rest:
        task.cancel()
    for task, outcome in zip(rest, await asyncio.gather(*rest, return_exceptions=True), strict=True):
        if isinstance(outcome, Exception):
            loop.call_exception_handler(
                {"message": f"{task.get_name()} failed while being cancelled", "exception": outcome}
            )

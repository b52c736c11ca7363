"""Where the engine's own words go: a file beside the swarm, never the terminal, which belongs to the live view.

hivemind and our engine log for developers; people read events (`events.py`). The file is cut at a size and kept once.
Nothing is configured at import: a command enters `engine_log` for as long as it runs.
"""

import logging
import logging.handlers
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

MAX_BYTES = 2 << 20
"""Size at which the file becomes `engine.log.1`."""


class _File(logging.handlers.RotatingFileHandler):
    """What a full disk does not take is left out: events tell of that (`log.full`), and logging's own way is a traceback on the terminal for each line."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


@contextmanager
def engine_log(path: Path) -> Iterator[None]:
    """Send everything that is logged through `logging` and structlog's default logger to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = _File(path, maxBytes=MAX_BYTES, backupCount=1, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    try:
        yield
    finally:
        structlog.reset_defaults()
        root.removeHandler(handler)
        root.setLevel(before)
        handler.close()

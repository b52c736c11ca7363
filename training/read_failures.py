"""What reading a data set of the Hugging Face hub raises, and which of it says only that network or hub lack something for a while."""

import errno
import lzma
import socket
import ssl
import sys
import zipfile
import zlib
from collections.abc import Iterator

_ERRORS_ELSEWHERE = (
    ("datasets.exceptions", "DatasetsError"),
    ("httpx", "HTTPError"),
    ("httpx2", "HTTPError"),
    ("aiohttp", "ClientError"),
    ("pyarrow", "ArrowException"),
    ("zstandard", "ZstdError"),
)
"""Of `datasets` and the libraries below it, those that need not be an OSError or ValueError."""

_NETWORK_ELSEWHERE = (
    ("httpx", "RequestError"),
    ("httpx2", "RequestError"),
    ("aiohttp", "ClientConnectionError"),
    ("aiohttp", "ClientPayloadError"),
    ("requests", "ConnectionError"),
    ("requests", "Timeout"),
    ("requests.exceptions", "ChunkedEncodingError"),
)
"""Of the same those that a network raises."""

_UNREACHABLE = frozenset({errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH})

_STATUSES = frozenset({408, 425, 429})
"""Of HTTP, below 500, that ask for another try later."""


def read_errors() -> tuple[type[Exception], ...]:
    """What opening and reading a stream may raise; StopIteration, where it looks for the first rows of an empty file."""
    damaged = (zlib.error, lzma.LZMAError, zipfile.BadZipFile)
    return (OSError, EOFError, ValueError, StopIteration, *damaged, *_loaded(_ERRORS_ELSEWHERE))


def may_pass(error: BaseException) -> bool:
    """Whether it, or what it came of, is a network's failure or a server's, and not that of what was asked for."""
    network: tuple[type[BaseException], ...] = (
        ConnectionError,
        TimeoutError,
        socket.gaierror,
        ssl.SSLError,
        *_loaded(_NETWORK_ELSEWHERE),
    )
    for one in _chain(error):
        status = _status(one)
        if status is not None:
            return status >= 500 or status in _STATUSES
        if isinstance(one, network) or (isinstance(one, OSError) and one.errno in _UNREACHABLE):
            return True
    return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it came of, of which there is an end."""
    one: BaseException | None = error
    for _ in range(16):
        if one is None:
            return
        yield one
        one = one.__cause__ or one.__context__


def _status(error: BaseException) -> int | None:
    """Of the HTTP answer that it is about, where it is about one: `httpx`, `requests` and the hub's library have it in the answer, `aiohttp` beside it."""
    answer = getattr(error, "response", None)
    status = getattr(error, "status", None) if answer is None else getattr(answer, "status_code", None)
    return status if isinstance(status, int) else None


def _loaded(names: tuple[tuple[str, str], ...]) -> list[type[Exception]]:
    """A library that was never imported has raised nothing."""
    return [getattr(sys.modules[module], name) for module, name in names if module in sys.modules]

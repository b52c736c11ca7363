"""Opening streamed data with the `datasets` library, which could do more with a spec than read data.

Older versions of it run what a data set brings along: scripts before 4, pickles before 5.2. So they are refused, and whatever is
opened is checked once more before a row is read: for what a data set of the hub is made of, the hub's files alone decide.
"""

import re
from typing import Any

from farflung.training.errors import DataError
from farflung.training.read_failures import read_errors
from farflung.training.stream_rows import StreamRows
from farflung.training.stream_spec import BUILDERS, StreamSpec, check_place

OLDEST = (5, 2)
"""Of `datasets`: the first in which no packaged format unpickles, as pyproject.toml says too."""

_PACKAGED = "datasets.packaged_modules."

_READERS = (*BUILDERS, "cache")
"""`cache` reads what the library has kept of a data set on this machine, where the hub cannot be reached."""

LIBRARY_TRIES = 2
"""Of `datasets` for each read: what is but for a moment does not cost the open stream."""

LIBRARY_PAUSE_S = 1
"""After each of them that failed, the last as well. By itself the library waits for a minute where a hub asks for fewer requests."""

_LIBRARY_PAUSES = (
    "STREAMING_READ_RETRY_INTERVAL",
    "STREAMING_READ_SERVER_UNAVAILABLE_RETRY_INTERVAL",
    "STREAMING_READ_RATE_LIMIT_RETRY_INTERVAL",
    "STREAMING_OPEN_RETRY_INTERVAL",
)
"""Its settings; not every version has all of them."""


def open_rows(spec: StreamSpec) -> tuple[StreamRows, int | None]:
    """The rows that `spec` names, and how many there are where that is told. Raises DataError, also when `datasets` is not installed."""
    spec.check()
    try:
        import datasets
    except ImportError as error:
        raise DataError("hf: needs the datasets library: pip install datasets") from error
    _check_version(datasets.__version__)
    # a bare name could as well be a folder here
    path = spec.dataset if spec.is_built or spec.is_local else f"hf://datasets/{spec.dataset}"
    try:
        builder = datasets.load_dataset_builder(path, spec.config, revision=spec.revision, data_files=spec.files)
        _check_builder(spec, builder)
        _read_on(builder, datasets.Features({spec.column: datasets.Value("string")}))
        stream = builder.as_streaming_dataset(split=spec.split)
    except RuntimeError as error:  # a data set that is a script
        raise DataError(f"hf:{spec.dataset}: {error}: use one of plain files") from error
    except read_errors() as error:
        raise DataError(f"hf:{spec.dataset}: {str(error) or 'there is nothing in it'}") from error
    _wait_little(datasets)
    splits = stream.info.splits or {}
    num_rows = splits[spec.split].num_examples if spec.split in splits else 0
    return StreamRows(stream, name=spec.dataset, column=spec.column), num_rows or None


def _check_version(version: str) -> None:
    """Nobody has to install it as the package asks for it."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise DataError(
            f"hf: needs datasets {oldest} or later, here is {version}, which may run code that comes with data: pip install -U datasets"
        )


def _check_builder(spec: StreamSpec, builder: Any) -> None:
    """What reads the rows, and from where. Making it has read names and a description only."""
    module = type(builder).__module__
    kind = module.removeprefix(_PACKAGED).partition(".")[0]
    if not module.startswith(_PACKAGED) or kind not in _READERS:
        raise DataError(f"hf:{spec.dataset} is of the format {kind!r}; what can be read is {', '.join(BUILDERS)}")
    for files in (builder.config.data_files or {}).values():
        for file in files:
            check_place(str(file))


def _read_on(builder: Any, column: Any) -> None:
    """One row must not end the reading of those behind it."""
    config = builder.config
    if hasattr(config, "encoding_errors"):  # text and CSV else end at a byte that is no UTF-8
        config.encoding_errors = "replace"
    if hasattr(config, "na_filter") and builder.info.features is None and config.features is None:
        # CSV has its types guessed anew for every ten thousand lines, and ends where they differ: at cells that are empty, or all numbers.
        config.usecols, config.features, config.na_filter = list(column), column, False


def _wait_little(datasets: Any) -> None:
    """The library tries for minutes by itself, in the thread that the model's rounds wait for; who reads here tries again in better places."""
    datasets.config.STREAMING_READ_MAX_RETRIES = datasets.config.STREAMING_OPEN_MAX_RETRIES = LIBRARY_TRIES
    for name in _LIBRARY_PAUSES:
        if hasattr(datasets.config, name):
            setattr(datasets.config, name, LIBRARY_PAUSE_S)

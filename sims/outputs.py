"""Where a command is to write, looked at before it measures: what cannot be written costs a line then, and minutes or hours of figures at the end."""

import os
from collections.abc import Iterable
from pathlib import Path

from farflung.protocol.errors import ConfigError


def check_outputs(*, files: Iterable[Path | None] = (), folders: Iterable[Path | None] = ()) -> None:
    """Make what is missing of the folders, those around the files among them. None is for what nobody asked for.

    Raises ConfigError for what cannot be written, and for a file that is named twice.
    """
    for folder in folders:
        if folder is not None:
            _check_folder(folder)
    seen = set[Path]()
    for file in files:
        if file is not None:
            _check_file(file)
            if file.resolve() in seen:
                raise ConfigError(f"{file} is named for two things: give each a file of its own")
            seen.add(file.resolve())


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(folder, error) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise _refused(folder, "no file can be made there")


def _check_file(file: Path) -> None:
    if file.is_dir():
        raise _refused(file, "it is a folder")
    if file.exists():
        # not opened: that would be the beginning, and the end, of what a pipe gets
        if not os.access(file, os.W_OK):
            raise _refused(file, "it is not ours to change")
        return
    # behind a link to what is not there yet
    real = file.resolve()
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        real.touch()
        real.unlink()
    except OSError as error:
        raise _refused(file, error) from error


def _refused(path: Path, why: OSError | str) -> ConfigError:
    said = why if isinstance(why, str) else why.strerror or str(why)
    return ConfigError(f"{path} cannot be written ({said}): name another place")

"""The files of a data folder: all of them, or an error that names what is in the way.

What was left out without a word would make other data of the same folder on another machine.
"""

import stat
from pathlib import Path

from farflung.training.errors import DataError


def files_in(root: Path) -> list[Path]:
    """The files of a folder and of those in it, in the order of their names as POSIX has them; links are followed. Raises DataError for what cannot be read, and for a link that leads nowhere or back."""
    found: list[Path] = []
    waiting = [(root, frozenset[tuple[int, int]]())]
    while waiting:
        folder, above = waiting.pop()
        try:
            status = folder.stat()
            here = (status.st_dev, status.st_ino)
            if here in above:
                raise DataError(f"{folder} leads back to a folder that it lies in; take it out of the data")
            for entry in folder.iterdir():
                mode = entry.stat().st_mode
                if stat.S_ISDIR(mode):
                    waiting.append((entry, above | {here}))
                elif stat.S_ISREG(mode):
                    found.append(entry)
        except OSError as error:
            raise unreadable(Path(error.filename or folder), error) from error
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be read: {error.strerror}; make it readable, or take it out of the data")

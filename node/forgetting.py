"""`farflung forget`: this machine gives a swarm up for good, with all that it has of it.

Its key stays: whoever forgets a swarm may join it again, as a newcomer. One that has not left before is still a member, and would come back without its votes
(docs/assumptions.md), so `warning` says so.
"""

import shutil
from pathlib import Path

from farflung.node.control import only_node
from farflung.node.durable import sync_folder, writing
from farflung.node.events import last_life
from farflung.node.paths import SwarmPaths
from farflung.protocol.errors import ConfigError, LocalError

FORGOTTEN = ".forgotten"
"""End of the name of a folder that is being removed."""


def warning(swarm: SwarmPaths) -> str | None:
    """What to think of before a swarm is forgotten of which this machine is still a member; None where it is not."""
    try:
        life = last_life(swarm.events)
    except ConfigError as error:
        return f"Whether its node has left is not known: {error}."
    if life is None:
        return None
    match life.end:
        case {"event": "node.stop", "member": False}:
            return None
        case {"event": "node.stop"}:
            how = "stopped before the others had let it go"
        case _:
            how = "did not stop, but was killed or failed"
    return (
        f"Its node {how}. If the swarm lives, start it (`farflung join {swarm.name}`) and leave (`farflung leave {swarm.name}`) first: a member that "
        "comes back without what it has voted for may vote twice."
    )


def forget(swarm: SwarmPaths) -> None:
    """Remove a swarm's folder. From one moment to the next it is not known any more; what an interruption leaves behind goes the next time.

    Raises ConfigError when its node runs, LocalError when the disk refuses.
    """
    swarms = swarm.folder.parent
    with only_node(swarm):
        _remove_what_is_left(swarms)
        with writing(swarm.folder):
            swarm.folder.rename(swarm.folder.with_name(swarm.hash_hex + FORGOTTEN))
        sync_folder(swarms)
    swarm.socket.unlink(missing_ok=True)
    _remove_what_is_left(swarms)


def _remove_what_is_left(swarms: Path) -> None:
    for folder in swarms.glob(f"*{FORGOTTEN}"):
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise LocalError(
                f"{error.filename or folder} of a swarm that is forgotten could not be removed: {error.strerror}; remove {folder} by hand"
            ) from error

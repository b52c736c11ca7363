"""`farflung forget`: this machine gives a swarm up for good, with all that it has of it.

Its key stays: whoever forgets a swarm may join it again, as a newcomer. One that has not left before is still a member, and would come back without its votes
(docs/assumptions.md), so `warning` says so.
"""

import shutil

from farflung.node.control import only_node
from farflung.node.durable import sync_folder
from farflung.node.events import last_event
from farflung.node.paths import SwarmPaths
from farflung.protocol.errors import LocalError

FORGOTTEN = ".forgotten"
"""End of the name of a folder that is being removed."""


def warning(swarm: SwarmPaths) -> str | None:
    """What to think of before a swarm is forgotten that this machine's node has not left; None where it has, or never ran. Raises ConfigError for a damaged log."""
    last = last_event(swarm.events)
    if last is None or last["event"] == "node.stop":
        return None
    return (
        f"Its node did not stop, but was killed or failed. If the swarm lives, start it (`farflung join {swarm.name}`) and leave (`farflung leave {swarm.name}`) "
        "first: a member that comes back without what it has voted for may vote twice."
    )


def forget(swarm: SwarmPaths) -> None:
    """Remove a swarm's folder. From one moment to the next it is not known any more; what an interruption leaves behind goes the next time.

    Raises ConfigError when its node runs, LocalError when the disk refuses.
    """
    swarms = swarm.folder.parent
    with only_node(swarm):
        swarm.folder.rename(swarm.folder.with_name(swarm.hash_hex + FORGOTTEN))
        sync_folder(swarms)
    swarm.socket.unlink(missing_ok=True)
    for folder in swarms.glob(f"*{FORGOTTEN}"):
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise LocalError(
                f"swarm {swarm.name} is forgotten, but {error.filename or folder} could not be removed: {error.strerror}; remove {folder} by hand"
            ) from error

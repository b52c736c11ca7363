"""`farflung forget`: this machine gives a swarm up for good, with all that it has of it.

Its key stays: whoever forgets a swarm may join it again, as a newcomer.
"""

import shutil

from farflung.node.control import only_node
from farflung.node.durable import sync_folder
from farflung.node.paths import SwarmPaths
from farflung.protocol.errors import LocalError

FORGOTTEN = ".forgotten"
"""End of the name of a folder that is being removed."""


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

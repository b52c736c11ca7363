"""Runs one command, ends it when its own standard input closes, and removes a folder: nothing stays after a SIGKILL.

Started as a script by `farflung.node.p2pd` with a pipe on standard input that the node never writes to. The kernel closes
the pipe when the node ends for whatever reason, which works on every POSIX system; Linux's PR_SET_PDEATHSIG would not
on macOS. Costs one small interpreter (about 10 MB). Imports the standard library only, to start in milliseconds.
"""

import os
import shutil
import signal
import subprocess
import sys
import threading

GRACE_S = 3.0
"""Time the command gets between SIGTERM and SIGKILL."""


def main(folder: str, command: list[str]) -> int:
    """Run `command` until it ends, the pipe closes or SIGTERM comes, then remove `folder` and what is in it.

    Returns the exit status, 128 + signal for a killed command.
    """
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stop.set())

    def watch_pipe() -> None:
        while os.read(0, 4096):
            pass
        stop.set()

    def end_child() -> None:
        stop.wait()
        child.terminate()
        try:
            child.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()

    threading.Thread(target=watch_pipe, daemon=True).start()
    threading.Thread(target=end_child, daemon=True).start()
    status = child.wait()
    shutil.rmtree(folder, ignore_errors=True)  # the node may have been faster
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

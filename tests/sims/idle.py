"""A process with a child, for tests of what is done to node processes: both live until they are ended."""

import subprocess
import sys
import time

if __name__ == "__main__":
    if sys.argv[1] == "parent":
        # As libp2p's guard does, the child ends when its standard input closes.
        code = "import sys; sys.stdin.read()"
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    while True:
        time.sleep(60)

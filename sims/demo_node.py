"""A node of `farflung demo`: `farflung join` with the words that follow, which ends with the demo, whatever ends that. Its standard input is a pipe that
nobody writes to.
"""

import sys

from farflung.node.cli import app
from farflung.sims.orphans import leave_with_parent


def main() -> None:
    """Entry point of the process."""
    leave_with_parent()
    app(["join", *sys.argv[1:]])


if __name__ == "__main__":
    main()

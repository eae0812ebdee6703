"""Ask the mount host whether it answers: `python -m csi_driver.host_check SOCKET`, the probe of the mounts' container.

Exit code 0 if it does within `TIMEOUT_S`, 1 if not, with why on stderr. Of two hosts (an upgrade) the newer one
answers. It imports nothing else of datacache: a probe runs twice a minute.
"""

from __future__ import annotations

import json
import socket
import sys

TIMEOUT_S = 8.0
"""Less than the probe's own time, so that its words are seen."""


def main() -> int:
    """Ask the mount host, and return the exit code."""
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m csi_driver.host_check SOCKET\n")
        return 2
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(TIMEOUT_S)
            connection.connect(sys.argv[1])
            connection.sendall(b'{"op": "ping"}\n')
            answer = json.loads(connection.makefile("rb").readline())
    except (OSError, ValueError) as exc:
        sys.stderr.write(f"the mount host at {sys.argv[1]} does not answer: {exc}\n")
        return 1
    return 0 if "ok" in answer else 1


if __name__ == "__main__":
    sys.exit(main())

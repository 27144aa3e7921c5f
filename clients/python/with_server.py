"""Runs a command with a private server: `python with_server.py COMMAND...`. The command finds it in HAPAX_ENDPOINT."""

import os
import subprocess
import sys

from hapax_server import Folder

if __name__ == "__main__":
    with Folder() as server:
        ended = subprocess.run(sys.argv[1:], env={**os.environ, "HAPAX_ENDPOINT": server.endpoint}, check=False)
    sys.exit(ended.returncode)

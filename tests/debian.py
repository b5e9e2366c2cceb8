"""Debian packages that tests need, installed where they are missing."""

import os
import shutil
import subprocess
from collections.abc import Sequence


def why_missing(programs: Sequence[str], packages: Sequence[str]) -> str:
    """Install packages if a program is missing; return the reason why it stays so, or an empty string."""
    if all(map(shutil.which, programs)):
        return ""
    if os.getuid() != 0 or not shutil.which("apt-get"):
        return f"{packages[0]} is missing, and installing it needs root and apt"
    quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
    install = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    if subprocess.run(install, **quiet).returncode:
        subprocess.run(["apt-get", "update"], **quiet)
        if subprocess.run(install, **quiet).returncode:
            return f"apt cannot install {packages[0]}"
    return ""

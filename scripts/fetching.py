"""What the scripts that fetch something share."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path


def new_folder_named(description: str | None) -> Path:
    """The command line's only argument, a folder that is not there yet; ends the process where it is.

    Args:
        description: of the script, for its help.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write to; must not exist")
    out = parser.parse_args().out.resolve()
    if out.exists():
        parser.error(f"{out} exists; name a new folder")
    return out


def download_wheel(package: str, folder: str) -> Path:
    """A package of the Python index, without what it depends on."""
    subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder, package], check=True)
    return next(Path(folder).glob("*.whl"))


def unpack_debian(package: str, folder: str) -> Path:
    """The content of a Debian package, in a folder of its own."""
    content = Path(folder) / package
    content.mkdir()
    subprocess.run(["apt-get", "download", package], cwd=folder, check=True)
    archive = next(Path(folder).glob(f"{package}_*.deb"))
    subprocess.run(["dpkg-deb", "-x", str(archive), str(content)], check=True)
    archive.unlink()
    return content

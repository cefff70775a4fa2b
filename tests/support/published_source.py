"""The source that a project publishes beside its wheels, where its tests are."""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path


def unpacked(name, version, folder):
    """Unpack the source of a release into the folder, and return where it lies there.

    It is downloaded once for each environment.
    """
    archive = Path(sys.prefix) / "sources" / f"{name}-{version}.tar.gz"
    if not archive.exists():
        archive.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=archive.parent) as place:
            options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-binary", name, "--dest", place]
            subprocess.run([sys.executable, "-m", "pip", "download", *options, f"{name}=={version}"], check=True)
            os.replace(Path(place) / archive.name, archive)
    with tarfile.open(archive) as source:
        source.extractall(folder, filter="data")
    return folder / f"{name}-{version}"

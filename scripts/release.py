"""Build what a release consists of, check it, and write its notes: `make release`.

Everything goes to `dist`, except the notes: `build/release/notes.md`. Nothing is published. If something is not ready,
it is printed and nothing is built, or with `--trial` all the same.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from environments import new_environment, pip_install
from wheel_without_compiler import check_contents

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
NOTES = ROOT / "build" / "release" / "notes.md"
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)\s]+)\)")
# One wheel for every Python from 3.11, by the stable ABI.
TAG = "-cp311-abi3-"
NO_DOCKER = "Docker does not run here, so the wheel would be for this machine only"


def project_of(root=ROOT):
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def not_ready(root=ROOT):
    """Return what has to be done before the version can be released."""
    version = project_of(root)["version"]
    heading = _heading(_text(root, "CHANGELOG.md"), version)
    found = []
    if f'__version__ = "{version}"' not in _text(root, "src/gradclip/__init__.py"):
        found.append(f"src/gradclip/__init__.py has another version than {version}")
    if f"\nversion: {version}\n" not in _text(root, "CITATION.cff"):
        found.append(f"CITATION.cff has another version than {version}")
    if heading is None:
        found.append(f"CHANGELOG.md has no section {version}")
    elif not re.fullmatch(r" \(\d{4}-\d{2}-\d{2}\)", heading[1]):
        found.append(f"CHANGELOG.md gives {version} no date: write '## {version} (YYYY-MM-DD)'")
    return found


def not_committed(root=ROOT):
    """Return what keeps the last commit from being the release: files that differ from it, and its missing tag."""
    tag = f"v{project_of(root)['version']}"
    found = [f"not committed: {line[3:]}" for line in _git(root, "status", "--porcelain")]
    if tag not in _git(root, "tag", "--points-at", "HEAD"):
        found.append(f"the last commit has no tag {tag}: run 'git tag {tag}'")
    return found


def _git(root, *arguments):
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def _text(root, name):
    return (root / name).read_text(encoding="utf-8")


def notes(changelog, version, repository=None):
    """Return the notes of a version: its section of the changelog. Links go to the repository, or become plain text."""
    heading = _heading(changelog, version)
    if heading is None:
        raise ValueError(f"the changelog has no section {version}. Write one that begins with '## {version}'.")
    text = changelog[heading.end() :].partition("\n## ")[0].strip()
    address = f"[{{}}]({repository.rstrip('/')}/blob/v{version}/{{}})" if repository else "{} ({})"
    return LINK.sub(lambda link: address.format(link[1], link[2]), text) + "\n"


def _heading(changelog, version):
    return re.search(rf"^## {re.escape(version)}(?= |$)(.*)$", changelog, re.M)


def wrong_tags(names):
    """Return the wheels that are not for the stable ABI of Python 3.11."""
    return [name for name in names if name.endswith(".whl") and TAG not in name]


def has_docker():
    return (
        shutil.which("docker") is not None
        and subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0
    )


def build(python, in_docker):
    """Build the sdist, and from it a wheel: in Docker for every Linux of this processor, else for this machine."""
    subprocess.run([python, "-m", "build", "--sdist", "--outdir", DIST, ROOT], check=True)
    (sdist,) = DIST.glob("*.tar.gz")
    check_contents(sdist)
    if in_docker:
        subprocess.run([python, "-m", "cibuildwheel", "--platform", "linux", "--output-dir", DIST, sdist], check=True)
        return
    subprocess.run([python, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", DIST, sdist], check=True)
    (wheel,) = DIST.glob("*.whl")
    alone = new_environment(".venv-wheel")
    pip_install(alone, wheel)
    subprocess.run([alone, ROOT / "scripts" / "smoke.py"], check=True)


def main(arguments=None):
    """Build, check and describe a release."""
    parser = argparse.ArgumentParser(description="Build a release, check it, and write its notes.")
    parser.add_argument("--trial", action="store_true", help="only print what is not ready")
    trial = parser.parse_args(arguments).trial
    in_docker = has_docker()
    left = [*not_ready(), *not_committed(), *([] if in_docker else [NO_DOCKER])]
    if left and not trial:
        sys.exit("\n".join(["Not ready for a release:", *left, "`make release TRIAL=--trial` builds anyway."]))
    project = project_of()
    told = notes(_text(ROOT, "CHANGELOG.md"), project["version"], project.get("urls", {}).get("Repository"))
    shutil.rmtree(DIST, ignore_errors=True)
    build(sys.executable, in_docker)
    files = sorted(DIST.iterdir())
    if wrong := wrong_tags([file.name for file in files]):
        sys.exit(f"wheels must have the tag {TAG.strip('-')}, got {wrong}")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files], check=True)
    NOTES.parent.mkdir(parents=True, exist_ok=True)
    NOTES.write_text(told, encoding="utf-8")
    print("\n".join(str(file.relative_to(ROOT)) for file in (*files, NOTES)))
    print("\n".join(f"not ready: {line}" for line in left) or "ready to be published")


if __name__ == "__main__":
    main()

"""What `make release` asks of a version, and the notes that it writes. The tests build nothing."""

import re
import subprocess
import tomllib

import pytest

import release
from release import ROOT

CHANGELOG = """# Changelog

Words before the first version.

## 1.2.0 (2030-05-06)

The second version.

### Fixed

- A page ([figures](docs/speed.md), [more](https://example.org/more)).

## 1.1.0 (2030-01-02)

The first version.
"""
FILES = {
    "pyproject.toml": '[project]\nname = "gradclip"\nversion = "1.2.0"\n',
    "src/gradclip/__init__.py": '__version__ = "1.2.0"\n',
    "CITATION.cff": "type: software\nversion: 1.2.0\nlicense: Apache-2.0\n",
    "CHANGELOG.md": CHANGELOG,
}
NOT_READY = {
    "src/gradclip/__init__.py": "src/gradclip/__init__.py has another version than 1.2.0",
    "CITATION.cff": "CITATION.cff has another version than 1.2.0",
}


def written(root, **changes):
    for name, text in (FILES | changes).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def git(root, *arguments):
    settings = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *settings, *arguments], cwd=root, check=True, capture_output=True)


@pytest.fixture
def committed(tmp_path):
    git(written(tmp_path), "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "All files")
    return tmp_path


def test_notes_are_the_section_of_the_version():
    assert release.notes(CHANGELOG, "1.1.0") == "The first version.\n"
    assert release.notes(CHANGELOG, "1.2.0") == (
        "The second version.\n\n### Fixed\n\n- A page (figures (docs/speed.md), [more](https://example.org/more)).\n"
    )


def test_links_of_the_notes_lead_to_the_repository_at_the_tag():
    found = release.notes(CHANGELOG, "1.2.0", "https://example.org/gradclip/")
    assert "([figures](https://example.org/gradclip/blob/v1.2.0/docs/speed.md), [more]" in found


@pytest.mark.parametrize("version", ["1.3.0", "1.2", "2.0", "1x2.0"])
def test_a_version_without_a_section_has_no_notes(version):
    with pytest.raises(ValueError, match=f"the changelog has no section {re.escape(version)}"):
        release.notes(CHANGELOG, version)


def test_notes_of_this_version_can_be_written():
    version = release.project_of()["version"]
    assert release.notes((ROOT / "CHANGELOG.md").read_text("utf-8"), version)


def test_a_version_that_all_files_agree_on_is_ready(tmp_path):
    assert release.not_ready(written(tmp_path)) == []


@pytest.mark.parametrize("name", NOT_READY)
def test_each_file_has_to_name_the_version(tmp_path, name):
    written(tmp_path, **{name: FILES[name].replace("1.2.0", "1.2.1")})
    assert release.not_ready(tmp_path) == [NOT_READY[name]]


@pytest.mark.parametrize("heading", ["1.2.0 (unreleased)", "1.2.0", "1.2.0 (2030-5-6)", "1.2.0 (2030-05-06) "])
def test_the_changelog_has_to_date_the_version(tmp_path, heading):
    changelog = CHANGELOG.replace("1.2.0 (2030-05-06)", heading)
    lacking = "CHANGELOG.md gives 1.2.0 no date: write '## 1.2.0 (YYYY-MM-DD)'"
    assert release.not_ready(written(tmp_path, **{"CHANGELOG.md": changelog})) == [lacking]


@pytest.mark.parametrize("heading", ["1.2.0.1 (2030-05-06)", "1.3.0 (2030-05-06)"])
def test_the_changelog_has_to_have_the_version(tmp_path, heading):
    changelog = CHANGELOG.replace("1.2.0 (2030-05-06)", heading)
    assert release.not_ready(written(tmp_path, **{"CHANGELOG.md": changelog})) == ["CHANGELOG.md has no section 1.2.0"]


def test_this_version_lacks_at_most_its_date():
    assert [line for line in release.not_ready() if "no date" not in line] == []


def test_the_last_commit_needs_the_tag(committed):
    lacking = "the last commit has no tag v1.2.0: run 'git tag v1.2.0'"
    assert release.not_committed(committed) == [lacking]
    git(committed, "tag", "v1.2.0.1")
    assert release.not_committed(committed) == [lacking]
    git(committed, "tag", "v1.2.0")
    assert release.not_committed(committed) == []


def test_files_that_differ_from_the_commit_are_named(committed):
    git(committed, "tag", "v1.2.0")
    (committed / "CITATION.cff").write_text("else\n", encoding="utf-8")
    (committed / "new").touch()
    assert release.not_committed(committed) == ["not committed: CITATION.cff", "not committed: new"]


def test_a_wheel_has_to_serve_every_python():
    right = ["gradclip-1.2.0-cp311-abi3-manylinux_2_28_x86_64.whl", "gradclip-1.2.0.tar.gz"]
    wrong = ["gradclip-1.2.0-py3-none-any.whl", "gradclip-1.2.0-cp311-cp311-linux_x86_64.whl"]
    assert release.wrong_tags([*right, *wrong]) == wrong


@pytest.mark.parametrize("docker", [False, True])
def test_nothing_is_built_before_a_version_is_ready(monkeypatch, docker):
    monkeypatch.setattr(release, "not_ready", list)
    monkeypatch.setattr(release, "not_committed", lambda: ["not committed: a"] if docker else [])
    monkeypatch.setattr(release, "has_docker", lambda: docker)
    monkeypatch.setattr(release, "build", lambda *_: pytest.fail("built"))
    with pytest.raises(SystemExit) as stopped:
        release.main([])
    assert stopped.value.code.splitlines() == [
        "Not ready for a release:",
        "not committed: a" if docker else release.NO_DOCKER,
        "`make release TRIAL=--trial` builds anyway.",
    ]


def test_the_page_on_releases_names_the_pinned_cibuildwheel():
    (pinned,) = [line for line in release.project_of()["optional-dependencies"]["release"] if "cibuildwheel" in line]
    assert f"\npip install {pinned}\n" in (ROOT / "RELEASING.md").read_text("utf-8")


def test_public_addresses_are_in_pyproject_only():
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"].get("urls", {})
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    pages = [name for name in listed.stdout.splitlines() if name.endswith((".md", ".toml", ".py", ".yml"))]
    assert len(pages) > 100
    others = [name for name in pages if name not in ("pyproject.toml", "tests/repository/test_release.py")]
    found = re.compile("|".join([r"https?://(?!example\.org)[\w./-]*gradclip", *map(re.escape, urls.values())]))
    assert [name for name in others if found.search((ROOT / name).read_text("utf-8"))] == []

"""Count the words of the pages, as `wc -w` does: `python scripts/words.py`. Pages that a command writes stand apart."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BY_COMMANDS = {
    "docs/parity.md": "scripts/parity.py",
    "docs/reference/arguments.md": "scripts/arguments.py",
    "docs/tested-with.md": "scripts/tested_with.py",
    "docs/gallery/hostile-clients.md": "scripts/gallery.py",
    "docs/gallery/learning-rates.md": "scripts/gallery.py",
    "docs/gallery/loss-spike.md": "scripts/gallery.py",
    "docs/gallery/private-epsilon.md": "scripts/gallery.py",
}


def counted():
    """Return the number of words of each page."""
    pages = [*sorted((ROOT / "docs").rglob("*.md")), *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG"))]
    pages.append(ROOT / "CONTRIBUTING.md")
    return {str(page.relative_to(ROOT)): len(page.read_text("utf-8").split()) for page in pages}


def written_by_hand():
    """Return the number of words of each page that no command writes."""
    return {page: words for page, words in counted().items() if page not in BY_COMMANDS}


def main():
    ours = written_by_hand()
    for page, words in ours.items():
        print(f"{words:7,} {page}")
    print(f"{sum(ours.values()):7,} together\n\nWritten by a command:")
    for page, words in counted().items():
        if page in BY_COMMANDS:
            print(f"{words:7,} {page} ({BY_COMMANDS[page]})")


if __name__ == "__main__":
    main()

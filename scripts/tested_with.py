"""Write the page of the libraries that gradclip is tested with: `python scripts/tested_with.py --write`.

`make trainers` runs every file of `tests/trainers`. The page has each library that such a file, or a worker that it
starts, imports, in the version that the extra `trainers` pins, and what the file says that it tests.
"""

import ast
import re
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "tested-with.md"
MARKS = "<!-- table: written by scripts/tested_with.py -->\n", "<!-- /table -->"
# How libraries write their names, by the names of their modules; and where the distribution has another one.
NAMES = {
    "accelerate": "accelerate",
    "bitsandbytes": "bitsandbytes",
    "deepspeed": "DeepSpeed",
    "flwr": "Flower",
    "lightning": "Lightning",
    "megatron": "Megatron-Core",
    "opacus": "Opacus",
    "peft": "peft",
    "pytorch_optimizer": "pytorch_optimizer",
    "stable_baselines3": "Stable-Baselines3",
    "transformers": "transformers",
    "trl": "TRL",
}
DISTRIBUTIONS = {"megatron": "megatron-core", "stable_baselines3": "stable-baselines3"}


def pins() -> dict[str, str]:
    """Return the versions that the extra `trainers` pins."""
    extra = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["trainers"]
    found = (re.fullmatch(r"([\w-]+)(?:\[.*\])?==(.+)", line) for line in extra)
    return {one[1]: one[2] for one in found if one}


def imported(path: Path) -> set[str]:
    """Return the top modules that a file imports, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def tested() -> dict[str, list[str]]:
    """Return the first sentences of the tests of each library, by the name of its module."""
    found: dict[str, list[str]] = defaultdict(list)
    folder = ROOT / "tests" / "trainers"
    for path in sorted(folder.glob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        sentence = (ast.get_docstring(ast.parse(text)) or "").partition("\n\n")[0].replace("\n", " ")
        started = [worker for worker in folder.glob("*_worker.py") if worker.stem in text]
        for module in set().union(*map(imported, (path, *started))) & NAMES.keys():
            found[module].append(sentence)
    return found


def table() -> str:
    """Return the table of the page."""
    versions, rows = pins(), ["| library | version | what the tests check |", "|---|---|---|"]
    for module, sentences in sorted(tested().items(), key=lambda pair: NAMES[pair[0]].lower()):
        version = versions[DISTRIBUTIONS.get(module, module)]
        rows.append(f"| {NAMES[module]} | {version} | {'<br>'.join(sentences)} |")
    return "\n".join([*rows, ""])


def page() -> str:
    """Return the page as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKS[0])
    return before + MARKS[0] + table() + MARKS[1] + rest.partition(MARKS[1])[2]


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(table())

"""Compare every function of the integrated libraries with ours; `--write` writes the results to docs/parity.md."""

import argparse

from side_by_side import page, record, run


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/parity.json and docs/parity.md")
    usual = [name for name in run.MODULES if name != "Lucid"]
    parser.add_argument(
        "--libraries", nargs="*", choices=run.MODULES, default=usual, help="without names, only make the page"
    )
    options = parser.parse_args()
    found = record.read()
    for name in options.libraries:
        found["libraries"][name] = record.of_library(run.library(name))
    found["libraries"] = {name: found["libraries"][name] for name in run.MODULES if name in found["libraries"]}
    print(page.page(found))
    if options.write:
        record.write(found)
        page.FILE.write_text(page.page(found))


if __name__ == "__main__":
    main()

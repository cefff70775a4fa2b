"""Print which part of gradclip imports which, and the longest chain of imports: `python scripts/structure.py [folder]`.

A room is a folder or a file of `src/gradclip`. Only imports that run when a module is imported count. Imports inside
functions, which load a framework when needed, and imports for types do not.
"""

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "gradclip"
# Modules that every room may import. They import only the kernels. Some are in the `backends` folder.
FLOOR = {
    *("tree", "leaves", "arithmetic", "typing", "wording", "guesses"),
    *(
        "backends",
        "core.formats",
        "core.arrays",
        "core.protocols",
        "backends.host.protocol",
        "core.values",
        "core.memory",
    ),
    *(
        "backends.registry",
        "backends.strangers",
        "backends.entries",
        "backends.framework",
        "backends.when_imported",
        "backends.releases",
    ),
}


def modules(root=ROOT):
    """Return a dict from module names to paths; a package has the name of its folder."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name, known):
    """Return the modules that a module imports when it is imported."""
    found = set()
    for node in run_at_import(ast.parse(known[name].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gradclip":
            each = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {one if one in known else node.module for one in each}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
    return found - {name}


def run_at_import(tree):
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not for_types and not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield node
            yield from run_at_import(node)


def graph(root=ROOT):
    known = modules(root)
    return {name: imports(name, known) for name in known}


def longest_chain(edges):
    @cache
    def chain_from(name):
        return [name, *max(map(chain_from, sorted(edges[name])), key=len, default=[])]

    return max(map(chain_from, edges), key=len)


def room_of(module):
    inside = module.partition(".")[2]
    if inside in FLOOR:
        return "floor"
    first = inside.split(".")[0]
    return {"": "gradclip", "__main__": "cli", "demo": "cli"}.get(first, first)


def rooms():
    return {room_of(module) for module in modules()} - {"gradclip"}


def imports_of_rooms(root=ROOT):
    """Return pairs of rooms: the first imports the second."""
    pairs = {(room_of(module), room_of(other)) for module, others in graph(root).items() for other in others}
    return {(room, other) for room, other in pairs if room != other and "gradclip" not in (room, other)}


if __name__ == "__main__":
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    pairs, chain = imports_of_rooms(root), longest_chain(graph(root))
    for room in sorted({room for pair in pairs for room in pair}):
        print(f"{room:<14} imports {', '.join(sorted(other for one, other in pairs if one == room)) or 'nothing'}")
    print(f"{len(modules(root))} modules; the longest chain of imports has {len(chain)}:")
    print("  " + "\n  ".join(chain))

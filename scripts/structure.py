"""Print how the parts of gradclip import each other: `python scripts/structure.py [folder]`.

A room is a folder or a file of `src/gradclip` or of `src/gradclip/_src`. Every import counts: those that run when a
module is imported, those inside functions, those for types only, and modules named in a string, which `importlib`
loads.
"""

import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "gradclip"
# The classes whose members a framework may have to know, by whom they describe.
OF_BACKENDS = ["Arithmetic", "Enter", "Reduce", "Scale", "ExampleSums", "Leave", "InPlace", "Sharded"]
DESCRIBED = {
    "Backend": [*OF_BACKENDS, "HostBackend"],
    "Framework": ["Framework"],
    "Trees": ["Trees"],
    "Batching": ["Batching"],
    "others": ["Axes", "Shards"],
}


def modules(root=ROOT):
    """Return a dict from module names to paths; a package has the name of its folder."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(name, known):
    """Return pairs: a module that the module `name` imports, and what it takes from there, empty for the whole."""
    pairs = set()
    for node in ast.walk(ast.parse(known[name].read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gradclip":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                pairs.add((whole, "") if whole in known else (_inside(node.module, known), alias.name))
        elif isinstance(node, ast.Import):
            pairs |= {(_inside(alias.name, known), "") for alias in node.names if alias.name.startswith("gradclip")}
        elif isinstance(node, ast.Constant) and str(node.value).startswith("gradclip.") and node.value in known:
            pairs.add((node.value, ""))
    return {(module, item) for module, item in pairs if module != name}


def _inside(module, known):
    """Return the module, or for one that is not written in Python the package that holds it."""
    return module if module in known else module.rpartition(".")[0]


def graph(root=ROOT):
    """Return a dict from each module to those that it imports."""
    known = modules(root)
    return {name: {module for module, _ in imported_names(name, known)} for name in known}


def importing(packages, root=ROOT):
    """Return the modules that import one of these other packages, at any time."""
    return {name for name, path in modules(root).items() if packages & set(_packages(path))}


def _packages(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").split(".")[0]


def circles(edges):
    """Return the lists of names that import each other, directly or through others."""
    imported = {name: reached(name, edges) for name in edges}
    mutual = {frozenset(other for other in imported[name] if name in imported[other]) for name in edges}
    return sorted(map(sorted, mutual - {frozenset()}))


def reached(name, edges):
    """Return the names that one imports, directly or through others."""
    found, waiting = set(), [name]
    while waiting:
        new = edges[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def longest_chain(edges):
    """Return a longest list of names each of which imports the next. There must be no circles."""

    @cache
    def chain_from(name):
        return [name, *max(map(chain_from, sorted(edges[name])), key=len, default=[])]

    return max(map(chain_from, edges), key=len)


def room_of(module):
    """Return the folder or file of a module; that of the package itself is `gradclip`."""
    return module.partition(".")[2].removeprefix("_src").strip(".").split(".")[0] or "gradclip"


def graph_of_rooms(edges):
    """Return a dict from each room to the others that it imports."""
    found = {room_of(module): set() for module in edges}
    for module, others in edges.items():
        found[room_of(module)] |= set(map(room_of, others)) - {room_of(module)}
    return found


def names_of_backends_in_core(root=ROOT):
    """Return how many names of `backends` the modules of `core` import, each counted once for each module."""
    known = modules(root)
    pairs = (pair for name in known if room_of(name) == "core" for pair in imported_names(name, known))
    return sum(room_of(module) == "backends" for module, _ in pairs)


def members(root=ROOT):
    """Return the names of the members that a framework may have to know, by whom they describe."""
    names_of = {node.name: set(_members_of(node)) for _, node in _classes(root)}
    return {who: set().union(*(names_of.get(name, ()) for name in names)) for who, names in DESCRIBED.items()}


def _members_of(node):
    for inner in node.body:
        name = inner.target.id if isinstance(inner, ast.AnnAssign) else getattr(inner, "name", "_")
        if not name.startswith("_"):
            yield name


def shared_class_names(root=ROOT):
    """Return a dict from each class name that several modules define to these modules."""
    found = {}
    for name, node in _classes(root):
        found.setdefault(node.name, set()).add(name)
    return {name: sorted(found[name]) for name in sorted(found) if len(found[name]) > 1}


def _classes(root):
    """Yield each class, also those inside of others and of functions, with the name of its module."""
    for name, path in modules(root).items():
        yield from ((name, node) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def main(root):
    """Print the rooms, the circles and the figures."""
    edges = graph(root)
    rooms = graph_of_rooms(edges)
    for room in sorted(rooms):
        print(f"{room:<14} imports {', '.join(sorted(rooms[room])) or 'nothing'}")
    found = circles(edges)
    for circle in found:
        print(f"a circle of {len(circle)}: {', '.join(circle)}")
    shared = shared_class_names(root)
    print(f"{len(shared)} class names in two files or more: {', '.join(shared)}")
    lines = sum(len(path.read_text().splitlines()) for path in modules(root).values())
    print(f"{lines:,} lines in {len(edges)} modules; {len(found)} circles of modules, {len(circles(rooms))} of rooms")
    known = members(root)
    counts = ", ".join(f"{who} {len(names)}" for who, names in known.items())
    print(f"{sum(map(len, known.values()))} framework members: {counts}")
    print(f"core uses {names_of_backends_in_core(root)} names of backends")
    if not found and not circles(rooms):
        chain, floors = longest_chain(edges), longest_chain(rooms)
        print(f"{len(floors)} floors, the longest chain of rooms: {', '.join(floors)}")
        print(f"the longest chain of modules has {len(chain)}:\n  " + "\n  ".join(chain))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)

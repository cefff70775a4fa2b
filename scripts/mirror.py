"""Which test files belong to which module: those of `_src/a/b.py` are `a/test_b.py` and `a/test_b_topic.py`."""

import ast
import re

INTERNAL = "_src/"


def defines_something(path):
    """Say whether a module holds more than its docstring, imports and constants."""
    kinds = ast.FunctionDef | ast.ClassDef
    return path.stem != "__init__" or any(isinstance(node, kinds) for node in ast.parse(path.read_text()).body)


def modules(room):
    """Return the names of modules in the room, as paths below it or `_src`; `init` is what a folder itself holds."""
    return {name_of(path, room) for path in room.rglob("*.py") if defines_something(path)}


def kernels(room):
    """Return the C++ files, which may have test files and need none."""
    return {name_of(path, room) for end in ("cpp", "hpp") for path in room.rglob(f"*.{end}")}


def name_of(path, room):
    """Return the name of a file in the room, without the underscore of what is not public."""
    named = path.with_name("init" if path.stem == "__init__" else re.sub("^_(?!_)", "", path.stem))
    return str(named.relative_to(room)).removeprefix(INTERNAL)


def module_of(file, names):
    """Return which of the modules a test file is about: the one with the longest name that it starts with."""
    folder, stem = file.parent, file.stem.removeprefix("test_")
    words = stem.split("_")
    for count in range(len(words), 0, -1):
        name = str(folder / "_".join(words[:count]))
        if name in names:
            return name
    return None


def tests_of(name, tests, names):
    """Return the test files of one of the modules, as paths in the folder of tests."""
    return [path for path in sorted(tests.rglob("test_*.py")) if module_of(path.relative_to(tests), names) == name]

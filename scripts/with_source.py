"""Run a script with another copy of gradclip's source: `with_source.py SRC SCRIPT [OPTIONS]`.

An editable installation finds its own copy before any path is searched, so its finder is removed.
"""

import runpy
import sys
from pathlib import Path


def use(source):
    """Have gradclip come from this folder, and raise SystemExit if it does not."""
    sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in type(one).__module__]
    sys.path.insert(0, str(source))
    import gradclip

    if not Path(gradclip.__file__).is_relative_to(source):
        raise SystemExit(f"gradclip comes from {gradclip.__file__}, not from {source}")


if __name__ == "__main__":
    source, script, *options = sys.argv[1:]
    use(Path(source).resolve())
    sys.argv = [script, *options]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")

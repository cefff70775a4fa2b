"""The pictures of the kinds of clipping were drawn by the script as it is, and stand on their page."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_kind_has_the_picture_that_the_script_draws(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "kinds_picture.py"))
    page = (ROOT / "docs" / "which-clipping.md").read_text(encoding="utf-8")
    assert {path.stem for path in script["FOLDER"].iterdir()} == script["KINDS"].keys()
    for name in script["KINDS"]:
        script["draw"](name, tmp_path / name)
        for path in (tmp_path / name, script["FOLDER"] / f"{name}.svg"):
            assert path.read_text(encoding="utf-8").endswith(script["mark"]())
        assert f"](assets/kinds/{name}.svg)" in page

"""The code on the pages of the site prints what they say."""

from pathlib import Path

import pytest

import code_blocks
import gallery
import test_readme

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# Keras' page runs in a process for each of its backends: tests/keras_backends. Those of trainers: tests/trainers.
# Those of the gallery are made of scripts: tests/test_gallery.py.
GALLERY = [str(gallery.page_file(name).relative_to(ROOT)) for name in gallery.PICTURES]
ELSEWHERE = {*test_readme.CODE_BLOCKS, "docs/keras.md", *code_blocks.WITH_TRAINERS, *GALLERY}
PAGES = {str(page.relative_to(ROOT)): page for page in sorted(DOCS.rglob("*.md"))}
TEXTS = {name: page.read_text(encoding="utf-8") for name, page in PAGES.items()}
WITH_CODE = [name for name, text in TEXTS.items() if "```python" in text and name not in ELSEWHERE]


@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Secure RNG turned off:UserWarning")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
@pytest.mark.filterwarnings("ignore:Optimal order is the largest alpha:UserWarning")
@pytest.mark.filterwarnings("ignore:step 2. A call of clip_grad_norm_ came after the step:UserWarning")
@pytest.mark.parametrize("page", WITH_CODE)
def test_code_prints_what_stands_below_it(page):
    assert code_blocks.run(PAGES[page]) == TEXTS[page].count("```python")


def test_no_code_hides_behind_another_name():
    kinds = {block.kind for text in TEXTS.values() for block in code_blocks.blocks(text)}
    others = {kind for kind in kinds if not (code_blocks.TITLED.fullmatch(kind) or code_blocks.PYTHON.fullmatch(kind))}
    assert others <= {"", "console"}


def test_what_a_page_says_wrongly_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n```\n1\n```\n    ```python\n    print(2)\n    ```\n")
    with pytest.raises(AssertionError, match=r"prints\n2"):
        code_blocks.run(page)
    page.write_text('```python title="a.py"\nprint(3)\n```\n```console\n$ python a.py\n4\n```\n')
    with pytest.raises(AssertionError, match=r"prints\n3"):
        code_blocks.run(page)
    page.write_text("```python\nx = 1\n```\n```\n1\n```\n")
    with pytest.raises(AssertionError, match="the page says\n1"):
        code_blocks.run(page)

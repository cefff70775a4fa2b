"""The code on the pages that need a trainer prints what the pages say."""

from pathlib import Path

import deepspeed  # noqa: F401  # it prints when it is first imported, and transformers imports it
import pytest

import code_blocks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", code_blocks.WITH_TRAINERS)
def test_code_prints_what_stands_below_it(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert code_blocks.run(ROOT / page) == text.count("```python") > 0


def test_a_page_that_says_something_else_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n```\n2\n```\n")
    with pytest.raises(AssertionError, match="the page says\n2\n"):
        code_blocks.run(page)

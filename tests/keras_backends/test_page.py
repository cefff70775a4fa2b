from pathlib import Path

import code_blocks


def test_code_on_the_page_prints_what_stands_below_it():
    assert code_blocks.run(Path(__file__).parents[2] / "docs" / "keras.md") == 2

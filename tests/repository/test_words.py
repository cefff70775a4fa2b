"""The pages stay short."""

import gallery
import words

MOST = 53_300


def test_the_pages_have_no_more_words_than_agreed():
    assert sum(words.written_by_hand().values()) <= MOST, "shorten a page: python scripts/words.py counts them"


def test_pages_that_a_command_writes_are_there():
    assert words.BY_COMMANDS.keys() <= words.counted().keys()
    drawn = {str(gallery.page_file(name).relative_to(words.ROOT)) for name in gallery.PICTURES}
    assert drawn == {page for page, script in words.BY_COMMANDS.items() if script == "scripts/gallery.py"}

from gradclip._src.updates.files.stored import FileError, shown


def test_names_are_shown_in_one_line_without_control_characters():
    assert shown("a\x1b[31m\nb\u202e") == "a\\x1b[31m\\nb\\u202e"
    assert shown("x" * 81) == "x" * 77 + "..."
    assert shown("x" * 81, None) == "x" * 81


def test_a_file_error_is_a_value_error():
    assert issubclass(FileError, ValueError)

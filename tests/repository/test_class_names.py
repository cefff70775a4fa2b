"""A class name means one thing: few are defined in two files."""

import structure

MOST = 5


def test_few_class_names_are_in_two_files():
    found = structure.shared_class_names()
    assert len(found) <= MOST, f"more than {MOST} class names are in two files or more: {found}"


def test_inner_classes_count_and_text_does_not(tmp_path):
    texts = {
        "a": "class A: pass\nclass B: pass\nclass C: pass",
        "b": "def f():\n    class A:\n        class B: pass",
        "c": "'''\nclass C: pass\n'''\nclass D: pass\nclass D: pass",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    both = [f"{tmp_path.name}.a", f"{tmp_path.name}.b"]
    assert structure.shared_class_names(tmp_path) == {"A": both, "B": both}

"""What a finding says."""

import pytest

import gradclip
from gradclip._src.guard.judge import FIXES, Finding


def test_a_finding_prints_what_was_seen_and_what_to_do():
    found = Finding.of(7, "after_step", "The norm was 5.")
    assert str(found) == "step 7: The norm was 5. Clip between loss.backward() and optimizer.step()."


def test_kinds_have_fixes_and_are_named_in_the_reference():
    named = {kind for kind in FIXES if f'"{kind}"' in gradclip.guard.__doc__ and f'"{kind}"' in Finding.__doc__}
    assert named == set(FIXES)
    assert all(fix.endswith(".") for fix in FIXES.values())
    with pytest.raises(KeyError):
        Finding.of(1, "no such kind", "")

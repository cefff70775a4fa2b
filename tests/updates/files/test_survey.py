"""What a survey of a pickle notes and refuses. `test_open_tricks.py` and `test_open_bombs.py` have whole files."""

import io
import pickle
import pickletools
import zipfile

import pytest
import torch

from gradclip._src.updates.files.survey import Stored, Survey


def pickled(value, tmp_path):
    torch.save(value, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        return archive.read("a/data.pkl")


def surveyed(data, **stored):
    found = Survey(data, "a", {f"a/data/{key}": place for key, place in stored.items()})
    found.check()
    return found


def test_storages_are_noted_in_the_order_in_which_they_are_loaded(tmp_path):
    one, other = torch.ones(2), torch.ones(3, dtype=torch.float64)
    data = pickled({"a": other, "b": one, "c": other[1:]}, tmp_path)
    found = surveyed(data, **{"0": Stored(7, 24), "1": Stored(40, 8)})
    assert found.in_order == {"0": (7, 24), "1": (40, 8)}


def test_nothing_of_the_pickle_runs(tmp_path):
    class Harm:
        def __reduce__(self):
            return (tmp_path / "harmed").touch, ()

    with pytest.raises(ValueError, match=r"does not know. Save it by torch\.save, with its own pickle_protocol"):
        surveyed(pickle.dumps(Harm()))
    surveyed(pickle.dumps(Harm(), protocol=2))
    assert not (tmp_path / "harmed").exists()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x80\x02.", "is damaged"),
        (b"\x80\x02cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R.", "holds too many values"),
        (b"\x80\x02}(NN" + b"K\x01K\x02\x86Nu.", "keys that are neither text nor numbers"),
        (b"\x80\x02}\x8a\x08\0\0\0\0\0\0\0\x20Ns.", "keys that are neither text nor numbers below"),
        (b"\x80\x02}ctorch\nSize\n(K\x01K\x01t\x85RNs.", "keys that are neither text nor numbers"),
        (b"\x80\x02ctorch\nFloatTensor\nK\x09\x85R.", "makes a tensor that is not stored"),
        (b"\x80\x02ctorch._utils\n_rebuild_wrapper_subclass\n)R.", "it holds a tensor of a subclass"),
        (b"\x80\x02ctorch._utils\n_rebuild_parameter\n)R}b.", "changes a tensor after it was made"),
    ],
)
def test_what_takes_much_or_hides_something_is_refused(data, why):
    with pytest.raises(ValueError, match=why):
        surveyed(data)


def test_a_pickle_of_very_many_parts_is_not_read_to_its_end():
    with pytest.raises(ValueError, match=r"more than 4000000 parts"):
        surveyed(b"\x80\x02" + b"N" * 4_000_000 + b".")


def test_the_operations_are_those_of_torch(tmp_path):
    data = pickled({"s": {1}, "w": torch.ones(1), "n": [1.5, None, True, 2**40, b"x", (), ("a",) * 5]}, tmp_path)
    codes = {code.code.encode("latin1")[0] for code, *_ in pickletools.genops(io.BytesIO(data))}
    assert codes <= set(Survey.dispatch)
    assert pickle.STACK_GLOBAL[0] not in Survey.dispatch

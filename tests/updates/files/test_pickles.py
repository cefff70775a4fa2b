import pickle
import struct

import pytest

from gradclip._src.updates.files.pickles import MOST_BYTES, Pickle

NAMES = {"collections.OrderedDict": lambda *pairs: dict(*pairs), "builtins.set": lambda items: ("a set", items)}


def read(data):
    return Pickle(data, NAMES, lambda key: ("storage", key)).read()


@pytest.mark.parametrize(
    "value",
    [
        {
            "a": [1, 255, 256, 70_000, -1, 2**40, 1.5, None, True, False],
            "é": (),
            "t": ((1,), (1, 2), (1, 2, 3), (1,) * 4),
        },
        [[], [[]], {}, {1: 2, (3, 4): "x" * 300}],
        "text",
    ],
)
def test_plain_values_are_those_of_pythons_pickle(value):
    data = pickle.dumps(value, 2)
    assert read(data) == pickle.loads(data)


def test_the_same_object_twice():
    one = [1]
    found = read(pickle.dumps([one, one], 2))
    assert found[0] is found[1]


def test_named_functions_are_ours():
    assert read(b"\x80\x02c__builtin__\nset\n]K\x01a\x85R.") == ("a set", [1])
    assert read(b"\x80\x02ccollections\nOrderedDict\n)R}X\x01\0\0\0aK\x01sb.") == {}
    assert read(b"\x80\x02K\x07Q.") == ("storage", 7)


class Harmful:
    def __reduce__(self):
        return print, ("this ran",)


REFUSED = {
    "code": (pickle.dumps(Harmful(), 2), r"builtins\.print, which torch\.load\(weights_only=True\) does not allow"),
    "system": (b"cos\nsystem\n(S'id'\ntR.", r"os\.system, which"),
    "escapes": (b"cos\nsys\x1b[31m\n.", r"os\.sys\\x1b\[31m, which"),
    "protocol 4": (pickle.dumps({"a": 1}, 4), r"the operation b'\\x95', which torch\.save does not write"),
    "empty": (b"", "is cut off"),
    "cut off": (pickle.dumps(["abc"], 2)[:-4], "is cut off|is damaged"),
    "long text": (b"X\xff\xff\xff\xffa", "is cut off"),
    "nothing on the stack": (b".", "is damaged"),
    "not remembered": (b"h\x05.", "is damaged"),
    "no mark": (b"t.", "is damaged"),
    "too few for a tuple": (b"K\x01\x87.", "is damaged"),
    "append to a dict": (b"}K\x01a.", "is damaged"),
    "item of a list": (b"]K\x01K\x01s.", "is damaged"),
    "a list as key": (b"}]K\x01s.", "is damaged"),
    "a number is called": (b"K\x01)R.", "is damaged"),
    "wrong arguments": (b"c__builtin__\nset\n)R.", "is damaged"),
    "a name without an end": (b"cos", "is cut off"),
    "invalid UTF-8": (b"X\x01\0\0\0\xff.", "is damaged"),
    "repeated key": (b"}(K\x01K\x02K\x01K\x03u.", "sets the key 1 more than once"),
    "a state": (b"]}b.", "objects with a state"),
    "a key of shared tuples": (b"})q\x00" + b"h\x00\x86q\x00" * 40 + b"K\x01s.", "a key of nested or long tuples"),
    "a key of nested tuples": (b"})" + b"\x85" * 300_000 + b"K\x01s.", "a key of nested or long tuples"),
    "a long key": (b"}(" + b"N" * 17 + b"tK\x01s.", "a key of nested or long tuples"),
    "keys with one hash": (
        b"}(" + b"".join(b"\x8a\x0c" + (n * (2**61 - 1)).to_bytes(12, "little") + b"N" for n in range(60_000)) + b"u.",
        "or of a huge integer",
    ),
    "a list given again and again": (
        b"](" + b"N" * 100_000 + b"eq\x01(" + b"c__builtin__\nset\nh\x01\x85R" * 100 + b"t.",
        "more than 1500000 operations",
    ),
    "long": (b"N" * (MOST_BYTES + 1), "gradclip reads at most"),
    "many operations": (b"N" * 1_500_001, "more than 1500000 operations"),
}


@pytest.mark.parametrize(("data", "why"), REFUSED.values(), ids=REFUSED)
def test_other_pickles_are_refused(capsys, data, why):
    with pytest.raises(ValueError, match=why) as found:
        read(data)
    assert str(found.value).isprintable()
    assert capsys.readouterr().out == ""


def test_a_high_number_in_the_memo_takes_no_memory():
    assert read(b"K\x01r" + struct.pack("<I", 2**32 - 1) + b".") == 1

"""Who may import whom. Every import counts, also those inside functions and those for types only."""

import pytest

import structure

# Rooms of one line do not import each other, and none imports a room of a line below it.
LAYERS = [
    {"advice", "public"},
    {"annotations", "flush_mode", "json_text", "native", "words"},
    {"core", "tree"},
    {"backends"},
    {"passed", "thresholds", "versions"},
    {"distributed", "look", "monitor"},
    {"inplace"},
    {"functional", "private", "step"},
    {"explained", "guard", "logs", "updates"},
    {"cli", "integrations", "typing"},
    {"__main__", "gradclip"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
ENGINES = ("jax", "tensorflow", "torch")
MOST_IN_A_CHAIN = 33


def violations(rooms):
    """Return which room imports one that is not below it."""
    pairs = ((room, other) for room, others in rooms.items() for other in others)
    return sorted(f"{room} imports {other}" for room, other in pairs if RANK[other] >= RANK[room])


@pytest.fixture(scope="module")
def edges():
    return structure.graph()


@pytest.fixture
def written(tmp_path):
    """Return a function that writes modules into a package, and returns who imports whom there."""

    def write(**texts):
        root = tmp_path / "gradclip"
        for name, text in texts.items():
            path = root / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return structure.graph(root)

    return write


def test_every_room_has_a_layer(edges):
    assert structure.graph_of_rooms(edges).keys() == RANK.keys()


def test_imports_go_down_only(edges):
    assert violations(structure.graph_of_rooms(edges)) == []


def test_no_modules_import_each_other(edges):
    assert structure.circles(edges) == []


def test_core_imports_only_types_and_the_wording_of_errors(edges):
    assert structure.graph_of_rooms(edges)["core"] <= {"annotations", "words"}
    assert structure.names_of_backends_in_core() == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_imports_no_engine_but_host(edges, engine):
    own = [name for name in edges if name.startswith(f"gradclip._src.backends.{engine}.")]
    others = [f"gradclip._src.backends.{other}" for other in ENGINES if other != engine]
    assert len(own) > 4
    assert [other for name in own for other in edges[name] if other.startswith(tuple(others))] == []


def test_frameworks_are_named_in_few_rooms():
    rooms = {"annotations", "backends", "guard", "integrations", "private", "step", "updates"}
    found = structure.importing({"jax", "tensorflow", "torch"})
    assert {structure.room_of(name) for name in found} == rooms
    inside = ("private.batching.", "private.ghost.", "private.noise.", "updates.files.")
    others = [name for name in found if structure.room_of(name) in ("private", "updates")]
    assert all(name.startswith(tuple(f"gradclip._src.{room}" for room in inside)) for name in others)


def test_the_check_sees_a_violation():
    assert violations({"core": {"words", "backends"}, "look": {"core"}}) == ["core imports backends"]


@pytest.mark.parametrize(
    "text",
    [
        "from gradclip.b import x",
        "from gradclip import b",
        "import gradclip.b",
        "import gradclip.b as b",
        "def f():\n    from gradclip.b import x",
        "class A:\n    def f(self):\n        import gradclip.b",
        "if TYPE_CHECKING:\n    from gradclip.b import x",
        "found = import_module('gradclip.b')",
    ],
)
def test_every_kind_of_import_counts(written, text):
    assert written(a=text, b="")["gradclip.a"] == {"gradclip.b"}


def test_what_is_not_written_in_python_counts_as_its_package(written):
    found = written(a="from gradclip._src.b._kernels import x", _src__b____init__="")
    assert found["gradclip.a"] == {"gradclip._src.b"}


def test_what_is_internal_is_in_rooms_of_its_own():
    names = {"gradclip": "gradclip", "gradclip._src": "gradclip", "gradclip._src.core.norms": "core"}
    names |= {"gradclip._src.look": "look", "gradclip.typing": "typing", "gradclip.integrations.torch": "integrations"}
    assert {name: structure.room_of(name) for name in names} == names


def test_circles_are_seen(written):
    edges = written(
        a="import gradclip.b", b="def f():\n    import gradclip.c", c="import gradclip.a", d="import gradclip.a"
    )
    assert structure.circles(edges) == [["gradclip.a", "gradclip.b", "gradclip.c"]]
    assert structure.circles({"a": {"b"}, "b": set()}) == []


def test_names_of_backends_are_counted(written, tmp_path):
    text = "from gradclip._src.backends.b import x, y\nfrom gradclip._src.core.a import z"
    written(
        _src__core__a="",
        _src__core__c=text,
        _src__core__d=text.splitlines()[0].replace(", y", ""),
        _src__backends__b="",
    )
    assert structure.names_of_backends_in_core(tmp_path / "gradclip") == 3


def test_there_are_as_many_layers_as_floors_and_no_long_chains(edges):
    assert len(structure.longest_chain(structure.graph_of_rooms(edges))) == len(LAYERS) == 11
    assert len(structure.longest_chain(edges)) <= MOST_IN_A_CHAIN


def test_chains_are_counted_in_what_imports_run():
    assert structure.longest_chain({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == ["a", "b", "c"]
    with pytest.raises(RecursionError):
        structure.longest_chain({"a": {"b"}, "b": {"a"}})

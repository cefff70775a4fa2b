"""Who may import whom."""

import pytest

import structure

# Rooms of one line do not import each other, and none imports a room of a line below it.
LAYERS = [
    {"floor", "native"},
    {"backends"},
    {"core", "arguments", "parameters", "versions"},
    {"distributed", "fast_path"},
    {"layers", "adaptive"},
    {"clip", "clip_units", "inplace", "norm_at_most", "per_example"},
    {"integrations", "monitor"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
MOST_IN_A_CHAIN = 11


def violations(rank):
    """Return which room imports one that is not below it."""
    pairs = structure.imports_of_rooms()
    return sorted(f"{room} imports {other}" for room, other in pairs if rank[other] >= rank[room])


def test_every_file_has_a_layer():
    assert structure.rooms() == set(RANK)


def test_imports_go_down_only():
    assert violations(RANK) == []


def test_the_check_sees_a_violation():
    assert "clip imports core" in violations({**RANK, "core": 99})


def test_the_check_sees_what_the_floor_imports(monkeypatch):
    monkeypatch.setattr(structure, "FLOOR", structure.FLOOR | {"backends.conversions"})
    assert violations(RANK) == ["floor imports backends"]


def test_there_are_eight_layers_and_no_long_chains():
    assert len(LAYERS) == 8
    assert len(structure.longest_chain(structure.graph())) <= MOST_IN_A_CHAIN


def test_chains_are_counted_in_what_imports_run():
    assert structure.longest_chain({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == ["a", "b", "c"]
    with pytest.raises(RecursionError):
        structure.longest_chain({"a": {"b"}, "b": {"a"}})

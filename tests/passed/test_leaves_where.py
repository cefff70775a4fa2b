"""`where=` chooses the leaves that count: as if the others were not there, but they come back as they are."""

import math
import random
from fractions import Fraction

import numpy as np
import optree
import pytest
import torch

import gradclip

WHERE = ("w", "blocks.*.kernel")
CALLS = {
    "global_norm": gradclip.global_norm,
    "global_norm, largest": lambda t, **k: gradclip.global_norm(t, math.inf, **k),
    "layer_norms": gradclip.layer_norms,
    "clip_by_global_norm": lambda t, **k: gradclip.clip_by_global_norm(t, 1.5, **k),
    "clip_by_global_norm, not clipped": lambda t, **k: gradclip.clip_by_global_norm(t, 1e4, **k),
    "clip_by_layer_norm": lambda t, **k: gradclip.clip_by_layer_norm(t, 0.7, ord=1, **k),
    "clip_by_unit_norm": lambda t, **k: gradclip.clip_by_unit_norm(t, 0.7, **k),
    "clip_by_value": lambda t, **k: gradclip.clip_by_value(t, 0.75, **k),
    "adaptive_grad_clip": lambda t, **k: gradclip.adaptive_grad_clip(t, t, clipping=0.1, **k),
}


def trees(framework):
    """Return a tree, and only the leaves of it that `WHERE` chooses. The others are what spoils a norm."""
    w, kernel = framework.array([[3.0, -0.5], [-4.0, 1.5]]), framework.array([[0.25, 12.0]])
    spoiled = [framework.array([math.nan, 1.0]), framework.array([[-math.inf]]), framework.array([1e38, 1e38])]
    tree = {"w": w, "head": spoiled[0], "blocks": [{"kernel": kernel, "bias": spoiled[1]}], "ww": spoiled[2]}
    return tree, {"w": w, "blocks": [{"kernel": kernel}]}


def leaves_of(result):
    return {path: np.asarray(leaf) for path, leaf in zip(*optree.tree_flatten_with_path(result)[:2], strict=True)}


def assert_as_alone(found, expected, tree):
    """Check results against those of the chosen leaves alone, to the bit; the others have norm 0 or are as before."""
    found, expected, before = leaves_of(found), leaves_of(expected), leaves_of(tree)
    for path, x in found.items():
        if path in expected:
            y = expected.pop(path)
        else:
            y = np.float32(0) if x.shape == () else next(x for at, x in before.items() if path[-len(at) :] == at)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)
    assert not expected


@pytest.mark.parametrize("where", [WHERE, list(WHERE), lambda name: name in ("w", "blocks.0.kernel")])
@pytest.mark.parametrize("call", CALLS)
def test_as_if_the_others_were_not_there(framework, call, where):
    tree, alone = trees(framework)
    found = framework.call(lambda t: CALLS[call](t, where=where), tree)
    assert_as_alone(found, framework.call(CALLS[call], alone), tree)


@pytest.mark.parametrize("nonfinite", ["propagate", "raise", "zero", "drop"])
def test_policies_look_at_what_is_chosen(framework, nonfinite):
    if framework.jit and nonfinite == "raise":
        with pytest.raises(ValueError, match="raise"):
            framework.call(lambda t: gradclip.clip_by_global_norm(t, 1.0, nonfinite=nonfinite), trees(framework)[0])
        return
    tree, alone = trees(framework)
    clip = lambda t, **k: gradclip.clip_by_global_norm(t, 1.5, nonfinite=nonfinite, **k)
    assert_as_alone(framework.call(lambda t: clip(t, where=WHERE), tree), framework.call(clip, alone), tree)


def test_what_is_left_is_the_same_object(framework):
    if framework.jit:
        return
    tree, _ = trees(framework)
    for clip in (gradclip.clip_by_global_norm, gradclip.clip_by_layer_norm, gradclip.clip_by_unit_norm):
        clipped, _ = framework.call(lambda t: clip(t, 1.0, where=WHERE), tree)  # noqa: B023
        assert clipped["head"] is tree["head"]
        assert clipped["ww"] is tree["ww"]
        assert clipped["blocks"][0]["bias"] is tree["blocks"][0]["bias"]
        assert clipped["w"] is not tree["w"]
    assert framework.call(lambda t: gradclip.clip_by_value(t, 1.0, where=WHERE), tree)["head"] is tree["head"]


def drawn(seed):
    """Return a random tree of half-integers, a random choice of its names, and the leaves that it chooses, by name."""
    draw = random.Random(seed)
    leaves = {}

    def node(name, depth):
        kind = draw.randrange(3) if depth < 3 else 0
        if kind == 0:
            shape = tuple(draw.randrange(1, 4) for _ in range(draw.randrange(3)))
            size = math.prod(shape)
            dtype = draw.choice([np.float32, np.float64, np.float16, np.int64])
            values = [draw.randrange(-64, 65) / (1 if dtype is np.int64 else 2) for _ in range(size)]
            leaves[name] = np.array(values, dtype).reshape(shape)
            return leaves[name]
        keys = [str(i) if kind == 1 else draw.choice("abc") + str(i) for i in range(draw.randrange(1, 4))]
        made = [node(f"{name}.{key}".strip("."), depth + 1) for key in keys]
        return made if kind == 1 else dict(zip(keys, made, strict=True))

    tree = {"x": node("x", 0), "y": [node("y.0", 0), np.array([3.0, 4.0])]}
    leaves["y.1"] = tree["y"][1]
    chosen = {name for name in leaves if draw.random() < 0.5} | {"y.1"}
    return tree, chosen, {name: leaf for name, leaf in leaves.items() if name in chosen}


def exact_square(leaves):
    floats = [leaf for leaf in leaves if leaf.dtype != np.int64]
    return sum(Fraction(float(x)) ** 2 for leaf in floats for x in leaf.ravel())


@pytest.mark.parametrize("seed", range(40))
def test_random_trees_beside_trees_filtered_by_hand(seed):
    tree, chosen, alone = drawn(seed)
    for where in (chosen.__contains__, sorted(chosen)):
        clipped, norm = gradclip.clip_by_global_norm(tree, 2.5, where=where)
        expected, known = gradclip.clip_by_global_norm(alone, 2.5)
        assert norm == known
        before, after = (optree.tree_leaves(one) for one in (tree, clipped))
        results = iter(optree.tree_leaves(expected))
        of_name = {id(leaf): name for name, leaf in alone.items()}
        for x, y in zip(before, after, strict=True):
            if id(x) in of_name:
                np.testing.assert_array_equal(y, expected[of_name[id(x)]])
                next(results)
            else:
                assert y is x
        assert next(results, None) is None
        counting = [y for x, y in zip(before, after, strict=True) if id(x) in of_name]
        assert exact_square(counting) <= Fraction(5, 2) ** 2
        assert exact_square(counting) >= Fraction(249, 100) ** 2
        total = exact_square(alone.values())
        limit = Fraction(math.isqrt(int(total * 4))) / 2
        assert gradclip.norm_at_most(tree, limit, where=where) == (limit**2 >= total)
        assert gradclip.norm_at_most(tree, limit + 1, where=where)


def test_exact_checks_and_parts():
    parts = [{"w": np.array([3.0]), "seen": np.array([math.inf])}, {"w": np.array([4.0]), "seen": np.array([1e300])}]
    assert gradclip.norm_at_most(parts[0], 3, where="w")
    assert not gradclip.norm_at_most(parts[0], Fraction(299, 100), where="w")
    whole = sum(gradclip.partial_norm(part, where="w") for part in parts)
    assert whole.norm == 5.0
    clipped = [whole.clip(part, 2.5, where="w") for part in parts]
    assert [tree["w"].tolist() for tree in clipped] == [[pytest.approx(1.5)], [pytest.approx(2.0)]]
    assert all(tree["seen"] is part["seen"] for tree, part in zip(clipped, parts, strict=True))


def test_a_part_in_which_nothing_is_chosen_warns():
    part = {"head": np.array([3.0])}
    with pytest.warns(UserWarning, match=r"nothing of this part counts or is clipped: .*'w' matches none of head"):
        assert gradclip.partial_norm(part, where="w").norm == 0.0
    whole = gradclip.partial_norm({"w": np.array([5.0])}, where="w")
    with pytest.warns(UserWarning, match="nothing of this part counts"):
        assert whole.clip(part, 1.0, where="w")["head"] is part["head"]


ERRORS = {
    "nothing chosen": (ValueError, r"'x' matches none of (blocks\.0\.bias|n, w)", {"where": "x"}),
    "no pattern": (TypeError, "where must be a pattern", {"where": 1}),
    "unknown word": (ValueError, "integers must be", {"integers": "convert"}),
    "integers": (TypeError, r"integers='raise' refuses integers: \['n'\] has dtype int", {"integers": "raise"}),
    "chosen integers": (TypeError, r"refuses integers: \['n'\]", {"integers": "raise", "where": ["n", "w"]}),
    "only integers": (TypeError, r"no floating-point numbers.*: \['n'\] has dtype int[^\[]*$", {"where": "n"}),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", [*CALLS, "norm_at_most"])
def test_errors(call, error):
    kind, match, arguments = ERRORS[error]
    function = CALLS.get(call, lambda t, **k: gradclip.norm_at_most(t, 1.0, **k))
    for make in (np.array, torch.tensor):
        with pytest.raises(kind, match=match):
            function({"n": make([100]), "w": make([3.0])}, **arguments)


@pytest.mark.parametrize("call", CALLS)
def test_integers_that_are_not_chosen_are_not_refused(call):
    tree = {"n": np.array([100]), "w": np.array([3.0])}
    found = CALLS[call](tree, where="w", integers="raise")
    assert_as_alone(found, CALLS[call]({"w": tree["w"]}), tree)


def test_refusing_integers_changes_nothing_without_any():
    tree = {"w": np.array([3.0, 4.0])}
    for call in CALLS.values():
        assert_as_alone(call(tree, integers="raise"), call(tree), tree)


def test_thresholds_for_what_is_left_are_not_needed_and_not_in_the_way():
    tree = {"w": np.array([3.0, 4.0]), "head": np.array([math.nan])}
    for max_norm in ({"w": 1.0}, {"w": 1.0, "head": 2.0}):
        clipped, norms = gradclip.clip_by_layer_norm(tree, max_norm, where="w")
        assert clipped["w"].tolist() == pytest.approx([0.6, 0.8])
        assert clipped["head"] is tree["head"]
        assert float(norms["w"]) == 5.0
    _, norms = gradclip.clip_by_layer_norm({"all": tree}, {"all": 1.0}, where="all.w")
    assert float(norms["all"]) == 5.0


def test_one_array_is_named_all():
    assert gradclip.global_norm(np.array([3.0, 4.0]), where="all") == 5.0
    with pytest.raises(ValueError, match="matches none of all"):
        gradclip.global_norm(np.array([3.0, 4.0]), where="w")


def test_only_integers_chosen():
    tree = {"w": np.ones(2), "n": np.array(3)}
    with pytest.raises(TypeError, match=r"^where chooses no floating-point numbers, so .*: \['n'\] has dtype int64"):
        gradclip.clip_by_global_norm(tree, 1.0, where="n")
    with pytest.warns(
        UserWarning, match="^of this part, where chooses no floating-point numbers, so nothing of it counts"
    ):
        assert gradclip.partial_norm(tree, where="n").norm == 0

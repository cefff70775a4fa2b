"""Ordinary arrays: to the bit what the pipeline makes of them, and nothing for all others."""

import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optree
import pytest
import torch

import gradclip
from fast_paths import in_full, same, settling
from gradclip._src import look
from gradclip._src.core.norms import Order

METHODS = ("norm", "clip_", "clipped")
DTYPES = ("float16", "bfloat16", "float32", "float64")
TORCH, NUMPY = "torch", "numpy"


@pytest.fixture
def taken(monkeypatch):
    """Return the names of the methods that settled a norm, in order."""
    return settling(monkeypatch, METHODS)


def leaves(kind, dtypes, scale, seed=0):
    """Return arrays of several shapes, one for each dtype, with magnitudes about a scale."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3,), (2, 5), (), (70_000,), (4, 1, 3)]
    made = [
        (torch.randn(shapes[i % len(shapes)], generator=generator, dtype=torch.float64) * scale).to(
            getattr(torch, dtype)
        )
        for i, dtype in enumerate(dtypes)
    ]
    return made if kind == TORCH else [x.numpy() for x in made]


def cases():
    for kind in (TORCH, NUMPY):
        known = [dtype for dtype in DTYPES if kind == TORCH or dtype != "bfloat16"]
        for dtypes in [*([dtype] * 5 for dtype in known), known, known[:2], [known[-1], known[0]]]:
            for scale in (1.0, 1e-3, 50.0):
                yield pytest.param(kind, dtypes, scale, id=f"{kind}-{'-'.join(dict.fromkeys(dtypes))}-{scale}")


@pytest.mark.parametrize("ord", [1, 2, 2.0, math.inf])
@pytest.mark.parametrize(("kind", "dtypes", "scale"), list(cases()))
def test_the_bits_are_those_of_the_pipeline(taken, kind, dtypes, scale, ord):
    tree = {"a": leaves(kind, dtypes, scale)}
    norm = gradclip.global_norm(tree, ord)
    assert all(same(norm, other) for other in in_full(gradclip.global_norm, tree, ord))
    for max_norm in (float(norm) * 2, float(norm) / 3, float(norm) * 1e-5, math.inf, 1):
        new, before = gradclip.clip_by_global_norm(tree, max_norm, ord=ord)
        for expected, same_norm in in_full(gradclip.clip_by_global_norm, tree, max_norm, ord=ord):
            assert same(before, same_norm)
            assert all(map(same, new["a"], expected["a"]))
        assert not any(x is y for x, y in zip(new["a"], tree["a"], strict=True))
        given, clipped = in_place(kind, tree["a"])
        norm_in_place = gradclip.clip_grad_norm_(given, max_norm, ord)
        for found, others in clipped_in_full(kind, tree["a"], max_norm, ord):
            assert same(norm_in_place, found)
            assert all(map(same, clipped(), others))
        assert all(map(same, clipped(), expected["a"]))
    given, _ = in_place(kind, tree["a"])
    assert same(gradclip.grad_norm(given, ord), norm)
    assert all(same(norm, other) for other in in_full(gradclip.grad_norm, given, ord))
    assert taken == ["norm", *["clipped", "clip_"] * 5, "norm"]


@pytest.mark.parametrize("max_norm", [torch.tensor(0.7), np.float32(0.7), np.array(0.7), 0.7], ids=repr)
@pytest.mark.parametrize(
    "spelling", [list, lambda params: {f"p{i}": p for i, p in enumerate(params)}], ids=["list", "dict"]
)
def test_other_spellings_are_ordinary_too(taken, spelling, max_norm):
    arrays = leaves(TORCH, DTYPES, 1.0)
    given, clipped = in_place(TORCH, arrays)
    norm = gradclip.clip_grad_norm_(spelling(given), max_norm)
    for found, others in clipped_in_full(TORCH, arrays, max_norm, spelling=spelling):
        assert same(norm, found)
        assert all(map(same, clipped(), others))
    new, _ = gradclip.clip_by_global_norm(arrays, max_norm)
    for expected, _ in in_full(gradclip.clip_by_global_norm, arrays, max_norm):
        assert all(map(same, new, expected))
    assert taken == ["clip_", "clipped"]


def in_place(kind, arrays):
    """Return what `clip_grad_norm_` takes, and what returns the gradients."""
    copies = [x.clone() if kind == TORCH else x.copy() for x in arrays]
    if kind == NUMPY:
        return {"a": copies}, lambda: copies
    parameters = [torch.nn.Parameter(torch.zeros_like(x)) for x in copies]
    for parameter, grad in zip(parameters, copies, strict=True):
        parameter.grad = grad
    return parameters, lambda: [parameter.grad for parameter in parameters]


def clipped_in_full(kind, arrays, max_norm, *args, spelling=lambda given: given):
    """Yield norms and gradients clipped in place, as `in_full` does."""
    copies = []

    def clip():
        given, gradients = in_place(kind, arrays)
        copies.append(gradients)
        return gradclip.clip_grad_norm_(spelling(given), max_norm, *args)

    for norm in in_full(clip):
        yield norm, copies[-1]()


def settled(parameters, max_norm, ord):
    """Return the norm of gradients clipped in place, if one look settles it."""
    known = look.to_clip(parameters, max_norm)
    return known and known[0].clip_(known[1], Order.parse(ord))


def new_of(tree):
    """Return a new tree, clipped to 1, if one look settles it."""
    known = look.read(optree.tree_leaves(tree))
    return known and known.clipped(1.0, Order(2.0))


def parameter(grad):
    made = torch.nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    made.grad = grad
    return made


class Subclass(torch.Tensor):
    pass


def read_only():
    array = np.ones(3)
    array.flags.writeable = False
    return array


SHARED = torch.ones(4)
TWICE = np.ones(4)
UNUSUAL = {
    "NaN": ([parameter(torch.tensor([math.nan, 1.0]))], 1.0, 2),
    "an infinity": ([parameter(torch.tensor([math.inf, 1.0]))], 1.0, math.inf),
    "another order": ([parameter(torch.ones(2))], 1.0, 3),
    "the smallest magnitude": ([parameter(torch.ones(2))], 1.0, -math.inf),
    "as large as the threshold": ([parameter(torch.ones(4))], 2.0, 2),
    "a tiny threshold": ([parameter(torch.ones(2))], 1e-40, 2),
    "no threshold at all": ([parameter(torch.ones(2))], 0.0, 2),
    "a threshold to differentiate": ([parameter(torch.ones(2))], torch.tensor(1.0, requires_grad=True), 2),
    "a threshold of JAX": ([parameter(torch.ones(2))], jnp.float32(1.0), 2),
    "sums that underflow": ([np.full(3, 1e-200)], 1e-201, 2),
    "sums that overflow": ([np.full(3, 1e200)], 1.0, 2),
    "complex": ([np.ones(3, complex)], 1.0, 2),
    "integers": ([np.ones(3, int)], 1.0, 2),
    "16-bit integers": ([np.ones(3, np.uint16)], 1.0, 2),
    "another byte order": ([np.ones(3, ">f4")], 1.0, 2),
    "masked": ([np.ma.masked_array(np.ones(3), [True, False, False])], 1.0, 2),
    "read-only": ([read_only()], 1.0, 2),
    "the same array twice": ([TWICE, TWICE], 1.0, 2),
    "shared memory": ([parameter(SHARED[:3]), parameter(SHARED[1:])], 1.0, 2),
    "expanded": ([parameter(torch.ones(1).expand(3))], 1.0, 2),
    "sparse": ([parameter(torch.eye(2).to_sparse())], 1.0, 2),
    "a subclass": ([parameter(torch.ones(3).as_subclass(Subclass))], 1.0, 2),
    "holders of other kinds": ([SimpleNamespace(grad=np.ones(3))], 1.0, 2),
    "two frameworks": ([parameter(torch.ones(3)), np.ones(3)], 1.0, 2),
    "parameters in a nested dict": ({"a": {"w": parameter(torch.ones(3))}}, 1.0, 2),
    "parameters beside arrays": ({"w": parameter(torch.ones(3)), "b": np.ones(3)}, 1.0, 2),
    "groups with thresholds": ([{"params": [parameter(torch.ones(3))], "max_norm": 1.0}], 1.0, 2),
    "groups with processes": ([{"params": [parameter(torch.ones(3))], "process_group": []}], 1.0, 2),
    "groups that are shared": ([{"params": [parameter(torch.ones(3))], "shared": True}], 1.0, 2),
    "groups with other settings": ([{"params": [parameter(torch.ones(3))], "max_grad_norm": 1.0}], 1.0, 2),
    "groups of pairs": ([{"params": [("w", parameter(torch.ones(3)))]}], 1.0, 2),
    "groups of arrays": ([{"params": [np.ones(3)]}], 1.0, 2),
    "pairs of arrays": ([("w", np.ones(3))], 1.0, 2),
    "pairs of other things": ([(parameter(torch.ones(3)), parameter(torch.ones(3)))], 1.0, 2),
    "no gradient": ([torch.nn.Parameter(torch.ones(3))], 1.0, 2),
    "nothing": ([], 1.0, 2),
    "on another device": ([SimpleNamespace(grad=torch.ones(3, device="meta"))], 1.0, 2),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_what_is_not_ordinary_is_left_to_the_pipeline(case):
    parameters, max_norm, ord = UNUSUAL[case]
    assert settled(parameters, max_norm, ord) is None


@pytest.mark.parametrize("case", ["the same array twice", "shared memory", "NaN", "another order", "expanded"])
def test_norms_of_what_is_not_ordinary_are_left_to_the_pipeline(case):
    parameters, _, ord = UNUSUAL[case]
    known = look.gradients(parameters)
    assert known is None or known.norm(Order.parse(ord)) is None


@pytest.mark.parametrize("values", [[3j, 4.0], [math.nan, 1.0]])
def test_an_empty_gradient_may_be_listed_twice(values):
    """It lies nowhere in memory, so nothing shows that it is the same."""
    empty, other = parameter(torch.ones(0, 3)), parameter(torch.tensor(values))
    norm = gradclip.clip_grad_norm_([empty, other, empty], 1.0)
    expected = [0.6j, 0.8] if norm == 5.0 else [math.nan, math.nan]
    torch.testing.assert_close(other.grad, torch.tensor(expected), equal_nan=True)


@pytest.mark.parametrize("spelling", [list, lambda params: {f"p{i}": p for i, p in enumerate(params)}])
def test_a_gradient_of_several_parameters_counts_for_each_and_is_scaled_once(taken, spelling):
    def clipped():
        shared, other = torch.tensor([3.0, 4.0]), torch.tensor([5.0])
        given = [parameter(x) for x in (shared, other, shared)]
        norm = gradclip.clip_grad_norm_(spelling(given), 1.0)
        assert given[0].grad is given[2].grad is shared
        return norm, shared, other

    found = clipped()
    assert taken == ["clip_"]
    assert float(found[0]) == pytest.approx(75**0.5)
    assert float(found[1].norm()) == pytest.approx(5 / 75**0.5)
    for expected in in_full(clipped):
        assert all(map(same, found, expected))


@pytest.mark.parametrize("policy", ["propagate", "drop", "zero"])
def test_what_one_look_leaves_open_of_a_gradient_of_several_parameters(policy):
    shared = torch.tensor([3.0, math.nan, 4.0])
    given = [parameter(shared), parameter(shared)]
    gradclip.clip_grad_norm_(given, 1.0, nonfinite=policy)
    size = {"propagate": math.nan, "drop": 0.0, "zero": 0.5**0.5}[policy]
    torch.testing.assert_close(shared.norm(), torch.tensor(size), equal_nan=True)


def test_an_array_that_a_tree_has_twice_counts_once():
    x = np.array([3.0, 4.0])
    assert gradclip.clip_grad_norm_({"a": x, "b": x}, 1.0) == 5.0
    assert np.linalg.norm(x) == pytest.approx(1.0)
    given = parameter(torch.tensor([3.0, 4.0]))
    assert float(gradclip.clip_grad_norm_([given, given], 1.0)) == 5.0
    assert float(given.grad.norm()) == pytest.approx(1.0)


def test_parameters_that_where_chooses_are_ordinary(taken):
    def clipped():
        made = {f"a.{i}": parameter(torch.tensor([3.0 + i, 4.0])) for i in range(3)}
        made["b"] = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        norm = gradclip.clip_grad_norm_(made, 1.0, where="a.*")
        return norm, *(made[f"a.{i}"].grad for i in range(3))

    found = clipped()
    assert taken == ["clip_"]
    for expected in in_full(clipped):
        assert all(map(same, found, expected))


def test_gradients_that_share_memory_count_each():
    square = torch.ones(2, 2)
    assert float(gradclip.grad_norm([parameter(square), parameter(square.T)])) == pytest.approx(8**0.5, rel=1e-6)


def test_parameters_in_place_of_gradients_are_warned_of():
    with torch.no_grad(), pytest.warns(UserWarning, match="grad"):
        gradclip.global_norm([parameter(torch.ones(3))])
    assert look.read([torch.nn.Parameter(torch.ones(4), requires_grad=False)]) is None


@pytest.mark.parametrize("max_norm", [-1.0, -1, math.nan, 2**60, True, "1", None])
def test_thresholds_that_are_no_ordinary_numbers_are_not_known(max_norm):
    given = [parameter(torch.ones(3))]
    assert settled(given, max_norm, 2) is None
    assert given[0].grad.tolist() == [1.0] * 3


def test_new_trees_of_what_is_not_ordinary_are_left_to_the_pipeline():
    wanted = torch.ones(3, requires_grad=True)
    for tree in (torch.ones(2, 3).T, wanted, torch.nn.Parameter(torch.ones(3)), 1.0, np.float32(1.0), {}, "text"):
        assert new_of(tree) is None
    with torch.no_grad():
        assert new_of(wanted) is not None
    with torch.autograd.forward_ad.dual_level():
        assert new_of(torch.ones(3)) is None


def test_negative_and_conjugated_views_are_left_to_the_pipeline():
    """In memory lies the original, which has other signs."""
    conjugated = torch.tensor([3 + 4j]).conj()
    for view in (conjugated, conjugated.imag):
        assert new_of([view]) is None
        clipped, _ = gradclip.clip_by_global_norm([view], 1.0)
        torch.testing.assert_close(clipped[0], view.resolve_conj().resolve_neg() / view.norm(), rtol=1e-6, atol=0)


def test_what_is_transformed_or_recorded_is_not_ordinary():
    def check(x):
        assert new_of(x) is None
        return x

    torch.func.vmap(check)(torch.ones(2, 3))
    torch.func.grad(lambda x: check(x).sum())(torch.ones(3))
    with pytest.warns((DeprecationWarning, FutureWarning), match="deprecated"):
        torch.jit.trace(check, torch.ones(3), check_trace=False)
    with torch._subclasses.FakeTensorMode():
        check(torch.ones(3))
    torch.fx.experimental.proxy_tensor.make_fx(check)(torch.ones(3))


def test_a_clipped_gradient_gets_a_new_version():
    given = parameter(torch.ones(3))
    before = given.grad._version
    gradclip.clip_grad_norm_([given], 10.0)
    assert given.grad._version == before
    gradclip.clip_grad_norm_([given], 1.0)
    assert given.grad._version > before


def test_norms_stay_on_the_cpu_whatever_the_default_device():
    torch.set_default_device("meta")
    try:
        with torch.device("cpu"):
            x = torch.ones(4)
        assert gradclip.global_norm([x]).item() == 2.0
    finally:
        torch.set_default_device(None)

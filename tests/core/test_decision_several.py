"""Several norms decided at once: to the bit what each part gives alone."""

import math
import warnings

import numpy as np
import pytest
import torch

import gradclip
from fast_paths import same
from part_by_part import at_once, part_by_part

DTYPES = {"torch": ("float16", "bfloat16", "float32", "float64"), "numpy": ("float16", "float32", "float64")}


def arrays(kind, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3,), (2, 5), (), (700, 100), (4, 1, 3)]
    made = [(torch.randn(shape, generator=generator) * 10).to(getattr(torch, dtype)) for shape in shapes]
    return made if kind == "torch" else [x.numpy() for x in made]


def holders(kind, tree):
    copies = [x.clone() if kind == "torch" else x.copy() for x in tree]
    if kind == "numpy":
        return copies, lambda: copies
    parameters = [torch.nn.Parameter(torch.zeros_like(x)) for x in copies]
    for parameter, grad in zip(parameters, copies, strict=True):
        parameter.grad = grad
    return parameters, lambda: [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("ord", [1, 2])
@pytest.mark.parametrize(("kind", "dtype"), [(kind, dtype) for kind in DTYPES for dtype in DTYPES[kind]])
def test_the_bits_are_those_of_each_part_alone(kind, dtype, ord):
    tree = arrays(kind, dtype)
    found = []
    for mode in (at_once, part_by_part):
        made = []
        with mode():
            made += gradclip.layer_norms(tree, ord)
            for max_norm in (1.0, 10, 1e9, [0.1, 1.0, 2, math.inf, 3.0]):
                clipped, norms = gradclip.clip_by_layer_norm(tree, max_norm, ord=ord)
                assert not any(x is y for x, y in zip(clipped, tree, strict=True))
                given, grads = holders(kind, tree)
                made += [*clipped, *norms, *gradclip.clip_grad_layer_norm_(given, max_norm, ord=ord), *grads()]
        found.append(made)
    assert all(map(same, *found))


def with_one(other):
    return [np.array([3.0, 4.0]), other]


UNUSUAL = {
    "NaN in one layer": (with_one(np.array([math.nan])), 1.0, 2),
    "zeros in float64": (with_one(np.zeros(2)), 1.0, 2),
    "another dtype": (with_one(np.ones(2, np.float32)), 1.0, 2),
    "the largest magnitude": (with_one(np.ones(2)), 1.0, math.inf),
    "as large as the threshold": (with_one(np.ones(4)), [1.0, 2.0], 2),
    "a negative threshold": (with_one(np.ones(2)), [1.0, -1.0], 2),
    "a threshold in an array": (with_one(np.ones(2)), [1.0, np.float32(1.0)], 2),
    "a threshold too few": (with_one(np.ones(2)), [1.0], 2),
    "integers": (with_one(np.ones(2, int)), 1.0, 2),
    "complex": ([np.ones(2, complex)], 1.0, 2),
    "nothing": ([], 1.0, 2),
    "nested": ([[np.ones(2)], np.ones(2)], [1.0, 1.0], 2),
}


def found_by(call):
    """Return the numbers of a call as text, or its error."""
    try:
        return repr(call())
    except (TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("case", UNUSUAL)
def test_what_is_not_decided_at_once_is_decided_part_by_part(case):
    tree, max_norm, ord = UNUSUAL[case]

    def in_place():
        copies = [x.copy() if isinstance(x, np.ndarray) else [y.copy() for y in x] for x in tree]
        return gradclip.clip_grad_layer_norm_(copies, max_norm, ord=ord), copies

    for call in (lambda: gradclip.clip_by_layer_norm(tree, max_norm, ord=ord), in_place):
        with part_by_part():
            expected = found_by(call)
        assert found_by(call) == expected


@pytest.mark.parametrize("max_norm", [1.0, 100.0])
def test_negative_and_conjugated_views_keep_their_signs(max_norm):
    conjugated = torch.full((3,), 3 + 4j).conj()
    for view in (conjugated, conjugated.imag):
        scale = min(1.0, max_norm / float(view.norm()))
        expected = view.resolve_conj().resolve_neg() * scale
        torch.testing.assert_close(gradclip.clip_by_layer_norm([view, view], max_norm)[0][1], expected)
        given, _ = holders("torch", [torch.zeros(3, dtype=view.dtype)] * 2)
        for parameter in given:
            parameter.grad = (
                torch.full((3,), 3 + 4j).conj() if view.is_complex() else torch.full((3,), 3 + 4j).conj().imag
            )
        gradclip.clip_grad_layer_norm_(given, max_norm)
        torch.testing.assert_close(given[0].grad.resolve_conj().resolve_neg(), expected)


def test_layers_that_are_kept_are_not_written(tmp_path):
    np.ones(16, np.float32).tofile(tmp_path / "gradient")
    mapped = np.memmap(tmp_path / "gradient", np.float32, "r")
    given, grads = holders("torch", [torch.ones(16), torch.ones(16)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of memory that cannot be written
        given[0].grad = torch.from_numpy(np.asarray(mapped))
    before = [grad._version for grad in grads()]
    assert gradclip.clip_grad_layer_norm_(given, [9.0, 1.0]) is not None
    assert [grad._version for grad in grads()] == [before[0], before[1] + 1]


def test_norms_beyond_float32_are_no_mistake_to_warn_of():
    large = np.full(4, 3e38, np.float32)
    with warnings.catch_warnings(), np.errstate(all="raise"):
        warnings.simplefilter("error")
        assert gradclip.layer_norms([large, large]) == [math.inf, math.inf]
        assert gradclip.clip_by_layer_norm([large, large], [1.0, 1e300])[1] == [math.inf, math.inf]
        assert gradclip.clip_grad_layer_norm_([large.copy(), large.copy()], 1.0) == [math.inf, math.inf]
        assert gradclip.layer_norms([np.full(2, 1e-310)] * 2)[0] > 0
        assert gradclip.clip_by_layer_norm([np.ones(3)] * 2, 1e-310)[0][0].max() < 1e-310


def test_a_frozen_parameter_has_no_norm():
    given, _ = holders("torch", [torch.full((2,), 3.0), torch.ones(3), torch.full((2,), 4.0)])
    given[1].grad = None
    with at_once():
        norms = gradclip.clip_grad_layer_norm_(given, [1.0, 2.0, 3.0])
    assert [norm if norm is None else round(float(norm), 5) for norm in norms] == [4.24264, None, 5.65685]
    assert [parameter.grad.norm().item() for parameter in given[::2]] == pytest.approx([1.0, 3.0], rel=1e-6)


def test_thresholds_may_be_in_another_tree():
    tree = {"w": np.array([3.0, 4.0]), "b": np.array([6.0, 8.0])}
    for tree_of, thresholds in (
        (lambda: tree, {"w": 1.0, "b": 2.0}),
        (lambda: {"x": tree}, {"x": {"w": 1.0, "b": 2.0}}),
    ):
        with at_once():
            clipped, _ = gradclip.clip_by_layer_norm(tree_of(), thresholds)
        found = clipped.get("x", clipped)
        assert np.linalg.norm(found["w"]) == pytest.approx(1.0)
        assert np.linalg.norm(found["b"]) == pytest.approx(2.0)


def test_a_layer_without_a_leaf_has_norm_0():
    tree = {"a": np.array([3.0, 4.0]), "b": [np.array([1, 2])]}
    with at_once():
        _, norms = gradclip.clip_by_layer_norm(tree, {"a": 1.0, "b": 1.0})
    assert (norms["a"].dtype, norms["b"].dtype) == (np.float64, np.float32)
    assert (norms["a"], norms["b"]) == (5.0, 0.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_norm_that_equals_its_threshold_is_kept_beside_others(dtype):
    tree = [np.array(x, dtype) for x in ([3.0, 4.0], [6.0, 8.0], [0.3, 0.4], [30.0, 40.0])]
    kept, _ = gradclip.clip_by_layer_norm(tree, [5.0, 10.0, 1.0, 25.0])
    assert [x.tolist() for x in kept[:3]] == [x.tolist() for x in tree[:3]]
    below, _ = gradclip.clip_by_layer_norm(tree, [math.nextafter(5.0, 0.0), 10.0, 1.0, 25.0])
    assert below[0].tolist() != tree[0].tolist()
    assert below[1].tolist() == tree[1].tolist()

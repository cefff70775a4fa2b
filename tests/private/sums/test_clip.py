import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import gradclip

GRADS = [[0, 0, 0], [0, 3, 4], [4, 0, 3], [3, 4, 0]]


def clip(framework, grads, *args, **kwargs):
    summed, info = framework.call(lambda g: gradclip.per_example_clip(g, *args, **kwargs), grads)
    return framework.numbers(summed), info


@pytest.mark.parametrize(
    ("max_norm", "total", "count"), [(np.inf, 7.0, 0), (0.0, 0.0, 3), (1.25, 1.75, 3), (5.0, 7.0, 0)]
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_reference_examples(framework, max_norm, total, count, dtype):
    summed, info = clip(framework, [framework.array(GRADS, dtype)], max_norm)
    np.testing.assert_allclose(summed[0], [total] * 3, rtol=1e-6)
    assert int(info.num_clipped) == count
    assert framework.to_numpy(info.norms).tolist() == [0.0, 5.0, 5.0, 5.0]


def naive(leaves, max_norm):
    """Clip example by example in float64, as a reader would write it."""
    total = [np.zeros(x.shape[1:]) for x in leaves]
    for i in range(len(leaves[0])):
        norm = np.sqrt(sum(np.sum(np.float64(x[i]) ** 2) for x in leaves))
        for t, x in zip(total, leaves, strict=True):
            t += x[i] * min(1.0, max_norm / norm)
    return total


@pytest.mark.parametrize("batch", [1, 2, 17])
def test_equals_the_naive_loop(framework, batch):
    rng = np.random.default_rng(batch)
    leaves = [rng.normal(size=(batch, 5, 7)).astype(np.float32), rng.normal(size=(batch,)).astype(np.float32)]
    summed, _ = clip(framework, [framework.array(x) for x in leaves], 3.0)
    for got, expected in zip(summed, naive(leaves, 3.0), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_layers(framework):
    tree = {
        "a": framework.array([[3.0, 4.0], [0.3, 0.4]]),
        "b": framework.array([[[6.0, 8.0, 0.0]], [[0.0, 0.0, 10.0]]]),
    }
    summed, info = clip(framework, tree, 2.0**0.5, per_layer=True)
    np.testing.assert_allclose(summed["a"], [0.9, 1.2], rtol=1e-6)
    np.testing.assert_allclose(summed["b"], [[0.6, 0.8, 1.0]], rtol=1e-6)
    assert framework.numbers(info.num_clipped) == {"a": 1, "b": 2}
    assert framework.numbers(info.norms)["b"].tolist() == [10.0, 10.0]
    summed, _ = clip(framework, tree, 5.0**0.5, per_layer=True, uniform=False)
    np.testing.assert_allclose(summed["a"], [0.3 + 0.6 * 2**0.5, 0.4 + 0.8 * 2**0.5], rtol=1e-6)
    np.testing.assert_allclose(summed["b"], [[0.6 * 3**0.5, 0.8 * 3**0.5, 3**0.5]], rtol=1e-6)


def test_one_bad_example_spoils_no_other(framework):
    grads = {"a": framework.array([[3.0, 4.0], [np.nan, 1.0]]), "b": framework.array([0.0, 2.0])}
    summed, info = clip(framework, grads, 1.0)
    np.testing.assert_allclose(summed["a"], [0.6, 0.8], rtol=1e-6)
    assert summed["b"] == 0.0
    assert np.isnan(framework.to_numpy(info.norms)[1])
    summed, _ = clip(framework, grads, 1.0, nonfinite="propagate")
    assert np.isnan(summed["a"]).all()


@pytest.mark.parametrize("shapes", [[(3, 2), (2, 2)], [(3,), ()], [(), (3,)]])
def test_ragged_batches_name_the_leaves(framework, shapes):
    tree = {"w": framework.array(np.ones(shapes[0])), "b": [framework.array(np.ones(shapes[1]))]}
    with pytest.raises(ValueError, match=r"batch on axis 0.*\['b'\]\[0\].*\['w'\]"):
        gradclip.per_example_clip(tree, 1.0)


@pytest.mark.parametrize("mask", [[True], [True] * 3, [[True, True]]])
def test_wrong_masks(framework, mask):
    with pytest.raises(ValueError, match="one boolean for each of the 2 examples"):
        gradclip.per_example_clip(framework.array(np.ones((2, 2))), 1.0, mask=np.array(mask))


def test_bad_settings(framework):
    grads = framework.array(np.ones((2, 2)))
    for bad in (-1.0, np.nan):
        with pytest.raises(ValueError, match="must not be negative"):
            gradclip.per_example_clip(grads, bad)
    with pytest.raises(ValueError, match="grads holds no arrays"):
        gradclip.per_example_clip({}, 1.0)
    if not framework.jit:
        with framework.mode(), pytest.raises(FloatingPointError, match="1 of 1 leaves"):
            gradclip.per_example_clip(framework.array([[np.nan], [1.0]]), 1.0, nonfinite="raise")


def test_traced_threshold_and_mask():
    grads = jnp.array([[3.0, 4.0], [6.0, 8.0]])
    clip = jax.jit(lambda g, c, m: gradclip.per_example_clip(g, c, mask=m)[0])
    np.testing.assert_allclose(clip(grads, 1.0, jnp.array([True, False])), [0.6, 0.8], rtol=1e-6)
    assert clip(grads, -1.0, jnp.array([True, True])).tolist() == [0.0, 0.0]


def test_rows_are_processed_in_blocks_on_a_device(monkeypatch):
    monkeypatch.setattr("gradclip._src.backends.torch.framework.in_host_memory", lambda tensor: False)
    monkeypatch.setattr("gradclip._src.backends.torch.device_examples._BLOCK", 3)
    x = torch.arange(14.0).reshape(7, 2)
    summed, info = gradclip.per_example_clip({"x": x}, 2.0)
    np.testing.assert_allclose(summed["x"], naive([x.numpy()], 2.0)[0], rtol=1e-6)
    np.testing.assert_allclose(info.norms, np.linalg.norm(x, axis=1), rtol=1e-6)


RULES = {
    "clip": lambda norm: min(1.0, 3.0 / norm),
    "normalize": lambda norm: 3.0 / norm,
    "automatic": lambda norm: 3.0 / (norm + 0.25),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rules(framework, rule, dtype):
    rows = np.array([[3.0, 4.0], [0.0, 0.0], [0.03, 0.04], [-6.0, 8.0]])
    options = {"rule": rule, "gamma": 0.25, "sum_dtype": None if "jax" in framework.name else "float64"}
    one_ulp = 2.0**-24 if "jax" in framework.name else 0.0
    call = lambda g: gradclip.per_example_clip(g, 3.0, **options)  # one function, which JAX compiles once
    for row in rows:
        summed = framework.to_numpy(framework.call(call, framework.array(row[None], dtype))[0])
        held = framework.to_numpy(framework.array(row, dtype)).astype(np.float64)
        norm = np.linalg.norm(held)
        expected = held * RULES[rule](norm) if norm else held
        np.testing.assert_allclose(summed, expected, rtol=2e-6)
        assert np.linalg.norm(summed.astype(np.float64)) <= 3.0 * (1 + one_ulp)
    _, info = clip(framework, [framework.array(rows, dtype)], 3.0, **options)
    assert int(info.num_clipped) == 2


@pytest.mark.parametrize("scale", [1e-30, 1e-38, 1e30, 1e-42])
def test_normalizing_reaches_over_the_whole_range(framework, scale):
    (summed,), _ = clip(framework, [framework.array([[3.0 * scale, 4.0 * scale]])], 5.0, rule="normalize")
    if framework.name == "mlx-device" and scale < 1e-30:  # such a device may read elements as zero
        assert 0.0 < np.linalg.norm(summed.astype(np.float64)) <= 5.0
        return
    np.testing.assert_allclose(summed, [3.0, 4.0], rtol=1e-6 if scale > 1e-39 else 1e-3)


def test_a_tree_of_thresholds_clips_groups(framework):
    tree = {
        "a": [framework.array([[3.0], [0.3]]), framework.array([[4.0], [0.4]])],
        "b": framework.array([[6.0, 8.0], [0.6, 0.8]]),
    }
    summed, info = clip(framework, tree, {"a": 1.0, "b": 5.0})
    np.testing.assert_allclose(summed["a"], [[0.9], [1.2]], rtol=1e-6)
    np.testing.assert_allclose(summed["b"], [3.6, 4.8], rtol=1e-6)
    assert framework.numbers(info.num_clipped) == {"a": 1, "b": 1}
    assert framework.numbers(info.norms)["b"].tolist() == [10.0, 1.0]
    with pytest.raises(ValueError, match="per_layer=True needs one number"):
        gradclip.per_example_clip(tree, {"a": 1.0, "b": 5.0}, per_layer=True)
    with pytest.raises(ValueError, match="prefix"):
        gradclip.per_example_clip(tree, {"a": 1.0})


@pytest.mark.parametrize(
    ("options", "match"), [({"rule": "AUTO"}, "rule must be one of"), ({"gamma": 0.0}, "gamma must")]
)
def test_unknown_rules_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        gradclip.per_example_clip(np.ones((2, 2)), 1.0, **options)


def test_sparse_tensors_are_no_examples():
    rows = torch.eye(3).to_sparse()
    with pytest.raises(TypeError, match=r"must be dense, got a torch.sparse.* at \['w'\]. Call .to_dense\(\) on it"):
        gradclip.per_example_clip({"w": rows}, 1.0)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("per_layer", [False, True])
def test_thresholds_in_arrays_of_another_framework_are_numbers(requires_grad, per_layer):
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4]], requires_grad=requires_grad)
    for max_norm in (jnp.array(0.5), np.array(0.5), 0.5):
        summed, _ = gradclip.per_example_clip([rows], max_norm, per_layer=per_layer)
        np.testing.assert_allclose(summed[0].detach(), [0.6, 0.8], rtol=1e-6)
        assert summed[0].requires_grad == requires_grad
    assert gradclip.per_example_clip(jnp.ones((2, 1)), torch.tensor(0.5))[0].tolist() == pytest.approx([1.0])


def test_traced_thresholds_of_another_framework_are_refused():
    clip_rows = jax.vmap(lambda x: gradclip.per_example_clip(x, torch.tensor(1.0))[0])
    with pytest.raises(TypeError, match=r"array of PyTorch without a known value.*of JAX\. Pass a number"):
        clip_rows(jnp.ones((2, 2, 3)))

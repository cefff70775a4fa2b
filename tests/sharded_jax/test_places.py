"""Eager results lie where the input lies, and are committed to it if that is, clipped or not."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gradclip import (
    clip_by_global_norm,
    clip_by_layer_norm,
    clip_by_value,
    clip_grad_norm_,
    clip_grad_value_,
    global_norm,
    grad_norm,
    layer_norms,
    partial_norm,
    per_example_clip,
)

THRESHOLDS = (0.0, 1.0, 1e300)
FUNCTIONAL = {
    "global": lambda tree, c: clip_by_global_norm(tree, c)[0],
    "layer": lambda tree, c: clip_by_layer_norm(tree, c)[0],
    "value": clip_by_value,
    "zero": lambda tree, c: clip_by_global_norm(tree, c, nonfinite="zero")[0],
    "parts": lambda tree, c: partial_norm(tree).clip(tree, c),
}
DTYPES = ("float32", "bfloat16", "float64")


def on(device, x, dtype="float32", *, committed=True):
    x = np.asarray(x).astype(jnp.dtype(dtype))
    with jax.enable_x64(True), jax.default_device(jax.devices()[device]):
        return jax.device_put(x, jax.devices()[device] if committed else None)


def split(x, dtype="float32", kind=AxisType.Auto, *, spec=("x",)):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[2:6])
    with jax.enable_x64(True):
        return jax.device_put(np.asarray(x).astype(jnp.dtype(dtype)), NamedSharding(mesh, P(*spec)))


def place(x):
    return x.sharding, x.committed


def assert_alike(results, leaves):
    for result, leaf in zip(results, leaves, strict=True):
        assert result is not leaf
        assert (result.dtype, result.shape) == (leaf.dtype, leaf.shape)
        assert result.committed == leaf.committed
        assert result.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONAL)
def test_results_lie_as_their_leaves(name, dtype):
    for committed in (False, True):
        leaves = [on(k, [3.0 + k, 4.0], dtype, committed=committed) for k in (2, 0, 5)]
        leaves.append(on(3, 1.0, dtype, committed=not committed))
        leaves.append(on(4, np.full(1 << 18, 0.5), dtype, committed=committed))
        assert {x.committed for x in leaves} == {True, False}
        numbers = list(map(np.asarray, leaves))
        for threshold in THRESHOLDS:
            results = FUNCTIONAL[name](leaves, threshold)
            assert_alike(results, leaves)
            expected = FUNCTIONAL[name](numbers, threshold)
            assert [np.asarray(x).tobytes() for x in results] == [x.tobytes() for x in expected]
            assert_alike(FUNCTIONAL[name](leaves[:1], threshold), leaves[:1])


@pytest.mark.parametrize("committed", [False, True])
def test_numbers_lie_with_their_arrays(committed):
    for device in (0, 2):
        leaves = [on(device, [[3.0, 4.0], [0.3, 0.4]], committed=committed) for _ in range(2)]
        summed, info = per_example_clip(leaves, 1.0)
        numbers = [
            *summed,
            *info,
            *jax.tree.leaves(per_example_clip(leaves, 1.0, per_layer=True)),
            global_norm(leaves),
            *layer_norms(leaves),
            grad_norm([SimpleNamespace(grad=x) for x in leaves]),
            clip_grad_norm_([SimpleNamespace(grad=x) for x in leaves], 1.0),
        ]
        for threshold in THRESHOLDS:
            numbers += [clip_by_global_norm(leaves, threshold)[1], *clip_by_layer_norm(leaves, threshold)[1]]
        assert {place(x) for x in numbers} == {place(leaves[0])}


def test_norms_of_layers_lie_with_their_layers():
    leaves = [on(2, [3.0, 4.0]), on(5, [1.0]), on(0, [1.0], committed=False)]
    for norms in (layer_norms(leaves), clip_by_layer_norm(leaves, 1.0)[1]):
        assert [place(x) for x in norms] == [place(x) for x in leaves]
        assert list(map(float, norms)) == [5.0, 1.0, 1.0]


def test_a_norm_of_several_devices_lies_with_the_first_array_that_is_committed():
    leaves = [on(0, [3.0], committed=False), on(2, [4.0]), on(3, [0.0])]
    norm = global_norm(leaves)
    assert (float(norm), *place(norm)) == (5.0, *place(leaves[1]))


@pytest.mark.parametrize(
    ("name", "dtype", "kind"),
    [
        *((name, "float32", AxisType.Auto) for name in FUNCTIONAL),
        ("global", "float64", AxisType.Explicit),
        ("value", "bfloat16", AxisType.Explicit),
    ],
)
def test_leaves_beside_sharded_ones_lie_as_before(name, dtype, kind):
    leaves = [
        on(0, [3.0, 4.0], dtype, committed=False),
        split(np.arange(8.0), dtype, kind),
        split(np.ones(3), dtype, kind, spec=()),
        on(3, 2.0, dtype, committed=False),
    ]
    for threshold in (1.0, 1e300):
        assert_alike(FUNCTIONAL[name](leaves, threshold), leaves)


def test_what_was_clipped_can_be_added_to_sharded_arrays():
    parameter = split(np.ones(8))
    for threshold in (1.0, 1e6):
        for gradient in (jnp.ones(8), split(np.ones(8))):
            for function in FUNCTIONAL.values():
                stepped = parameter + function({"w": gradient}, threshold)["w"]
                assert stepped.sharding == parameter.sharding
            norm = clip_by_global_norm({"w": jnp.ones(8)}, threshold)[1]
            assert (parameter * norm).sharding == parameter.sharding


def test_wide_sharded_arrays_keep_their_range_in_32_bit_mode():
    leaves = [split([3e200, 0.0, 0.0, 0.0], "float64"), split([0.0, 4e200, 0.0, 0.0], "float64")]
    clipped, norm = clip_by_global_norm(leaves, 5.0)
    assert (norm.dtype, float(norm)) == ("float64", pytest.approx(5e200, rel=1e-14))
    assert [np.asarray(x).max() for x in clipped] == pytest.approx([3.0, 4.0], rel=1e-14)
    assert np.asarray(clip_by_value(leaves, 2e200)[0])[0] == 2e200
    batch = split([[3e200, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.5]], "float64")
    summed, info = per_example_clip(batch, 2.0)
    assert (summed.dtype, info.norms.dtype) == ("float64", "float64")
    assert np.asarray(summed).tolist() == pytest.approx([2.0, 2.5], rel=1e-14)


@pytest.mark.parametrize("threshold", [1.0, 1e300])
def test_gradients_in_place_stay_what_they_are(threshold):
    def holders(whole):
        wide = np.array([3e200, 4.0, 1e-300]) if whole else np.array([3.0, 4.0])
        grads = [on(2, wide, "float64"), wide, on(0, [1.0, 2.0], committed=False)]
        if not whole:
            grads = [split(np.arange(4.0)), *grads[1:]]
        return [SimpleNamespace(grad=grad) for grad in grads]

    for call in (clip_grad_norm_, clip_grad_value_):
        for whole in (True, False):
            parameters = holders(whole)
            before = [p.grad for p in parameters]
            call(parameters, threshold)
            after = [p.grad for p in parameters]
            assert after[1] is before[1]
            assert after[1].dtype == np.float64
            for new, old in ((after[0], before[0]), (after[2], before[2])):
                assert (new.dtype, *place(new)) == (old.dtype, *place(old))


def test_leaves_of_numpy_beside_sharded_ones_stay_what_they_are():
    tree = {"numpy": np.array([3e200, 4.0]), "jax": split(np.ones(4)), "scalar": np.float64(1.0)}
    for function in (clip_by_value, FUNCTIONAL["global"]):
        for threshold in (1.0, 1e300):
            clipped = function(tree, threshold)
            assert type(clipped["numpy"]) is np.ndarray
            assert type(clipped["scalar"]) is np.float64
            assert clipped["numpy"].dtype == np.float64
            assert not np.shares_memory(clipped["numpy"], tree["numpy"])
            assert clipped["jax"].sharding == tree["jax"].sharding


def test_weak_types_on_meshes_stay_weak():
    tree = [split(np.ones(4)), jnp.asarray(2.0)]
    for function in (clip_by_value, FUNCTIONAL["global"]):
        for threshold in (1.0, 1e300):
            assert [x.weak_type for x in function(tree, threshold)] == [False, True]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "call",
    [
        lambda t: clip_by_global_norm(t, 1.0),
        lambda t: global_norm(t, np.inf),
        partial_norm,
        lambda t: per_example_clip(t, 1.0),
        lambda t: clip_grad_norm_([SimpleNamespace(grad=x) for x in t], 1.0),
    ],
    ids=["global", "largest", "parts", "examples", "in place"],
)
def test_an_array_that_lies_elsewhere_is_told_where_to_lie(call, kind):
    for tree in ([split(np.ones(8), kind=kind), on(1, np.ones(8))], [on(0, np.ones(8)), split(np.ones(8), kind=kind)]):
        elsewhere = r"\[0\] and \[2, 3, 4, 5\]" if tree[0].sharding.num_devices == 1 else r"\[2, 3, 4, 5\] and \[1\]"
        with pytest.raises(ValueError, match=f"must lie on the same devices.*on the devices {elsewhere}. Put all on"):
            call(tree)
    assert np.asarray(tree[0]).tolist() == [1.0] * 8
    call([jax.device_put(tree[0], tree[1].sharding), tree[1]])

"""Prefixes of a tree, which say what lies below one threshold: also of containers that JAX alone knows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip


class State:
    """A container as those of Flax: attributes, known to JAX alone."""

    def __init__(self, **items):
        self.items = items


jax.tree_util.register_pytree_with_keys(
    State,
    lambda s: ([(jax.tree_util.DictKey(k), s.items[k]) for k in sorted(s.items)], tuple(sorted(s.items))),
    lambda keys, values: State(**dict(zip(keys, values, strict=True))),
)


class Checked:
    """A node that looks at the shape of what it is built from."""

    def __init__(self, w):
        self.w, self.size = w, w.shape[0]


jax.tree_util.register_pytree_with_keys(
    Checked, lambda c: ([(jax.tree_util.GetAttrKey("w"), c.w)], None), lambda _, children: Checked(*children)
)


def test_nodes_that_look_at_their_arrays_are_named_and_found_below_prefixes():
    tree = {"a": Checked(jnp.array([3.0, 4.0])), "b": jnp.array([12.0])}
    clipped, norms = gradclip.clip_by_layer_norm(tree, {"a": 2.5, "b": 6.0})
    assert np.allclose(clipped["a"].w, [1.5, 2.0])
    assert float(norms["a"]) == 5.0
    clipped, _ = gradclip.clip_by_global_norm(tree, 2.5, where="a.w")
    assert np.allclose(clipped["a"].w, [1.5, 2.0])
    assert clipped["b"] is tree["b"]
    with pytest.raises(ValueError, match=r"\['b'\]"):
        gradclip.clip_by_layer_norm(tree, {"a": 2.5})
    with pytest.raises(ValueError, match=r"a\.w"):
        gradclip.clip_by_global_norm(tree, 2.5, where="c")


def test_a_plain_dict_of_thresholds_is_a_prefix_of_other_containers():
    state = State(
        a=State(w=jnp.array([3.0, 4.0]), b=jnp.array([12.0])),
        z=State(w=jnp.array([0.0, 8.0])),
    )
    clipped, norms = gradclip.clip_by_layer_norm(state, {"a": 6.5, "z": {"w": 4.0}})
    assert isinstance(clipped, State)
    assert np.allclose(clipped.items["a"].items["b"], [6.0])
    assert np.allclose(clipped.items["z"].items["w"], [0.0, 4.0])
    assert {"a": float(norms["a"]), "z": float(norms["z"]["w"])} == {"a": 13.0, "z": 8.0}
    norms = gradclip.layer_norms(state, prefix={"a": 0, "z": 0})
    assert {key: float(norm) for key, norm in norms.items()} == {"a": 13.0, "z": 8.0}
    batch = jax.tree.map(lambda x: x[None], state)
    _, info = gradclip.per_example_clip(batch, {"a": 6.5, "z": 4.0})
    assert set(info.norms) == {"a", "z"}
    for wrong in ({"a": 1.0}, {"a": 1.0, "z": 1.0, "x": 1.0}, {"a": {"w": 1.0}, "z": 1.0}):
        with pytest.raises(ValueError, match="prefix of the tree"):
            gradclip.clip_by_layer_norm(state, wrong)


def test_layer_norms_of_a_prefix():
    tree = {"a": {"w": np.array([3.0, 4.0]), "b": np.array([12.0])}, "z": np.array([2.0])}
    for prefix in ({"a": 1.0, "z": 2.0}, {"a": "any", "z": "thing"}):
        norms = gradclip.layer_norms(tree, prefix=prefix)
        assert {key: float(norm) for key, norm in norms.items()} == {"a": 13.0, "z": 2.0}
    assert float(gradclip.layer_norms(tree, 1, prefix=0)) == 21.0
    with pytest.raises(ValueError, match="prefix of the tree"):
        gradclip.layer_norms(tree, prefix={"b": 1.0})


TREE = {"w": np.array([3.0, 4.0]), "b": np.array([12.0])}


@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ({"w": 1.0}, r"nothing is given for \['b'\]\.$"),
        ({"w": 1.0, "b": 1.0, "c": 1.0}, r"no gradient at \['c'\]\.$"),
        ({"v": 1.0, "b": 1.0}, r"nothing is given for \['w'\], and there is no gradient at \['v'\]\.$"),
        ([1.0, 1.0], r"nothing is given for \['b'\], \['w'\], and there is no gradient at \[0\], \[1\]\.$"),
    ],
)
def test_what_has_no_threshold_is_named(prefix, message):
    with pytest.raises(ValueError, match=f"^the thresholds must be one number or a prefix .*{message}"):
        gradclip.clip_by_layer_norm(TREE, prefix)
    with pytest.raises(ValueError, match=f"^prefix must be one number or a prefix .*{message}"):
        gradclip.layer_norms(TREE, prefix=prefix)

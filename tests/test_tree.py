import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gradclip._src.tree import dotted, flatten


def test_leaves_come_in_order_and_none_is_no_leaf():
    flat = flatten({"b": np.array([2.0]), "a": [None, np.array([1.0])]})
    assert [float(x[0]) for x in flat.leaves] == [1.0, 2.0]
    assert flat.rebuild("xy") == {"b": "y", "a": [None, "x"]}


@pytest.mark.parametrize("xp", [np, jnp])
def test_paths_are_python(xp):
    tree = {"layer": [xp.ones(1), (xp.ones(1),)], 3: xp.ones(1)} if xp is np else {"layer": [xp.ones(1), (xp.ones(1),)]}
    paths = flatten(tree).paths()
    assert "['layer'][1][0]" in paths
    assert len(paths) == len(flatten(tree).leaves)


def test_a_bare_array_has_an_empty_path():
    assert flatten(np.ones(2)).paths() == [""]
    assert flatten(jnp.ones(2)).paths() == [""]


def test_nodes_that_only_jax_knows():
    @jax.tree_util.register_pytree_node_class
    class Box:
        def __init__(self, content):
            self.content = content

        def tree_flatten(self):
            return (self.content,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*children)

    flat = flatten([Box(jnp.ones(2)), Box(np.zeros(1))])
    assert len(flat.leaves) == 2
    assert isinstance(flat.rebuild(flat.leaves)[0], Box)


def test_split_by_a_prefix():
    flat = flatten({"a": [np.ones(1), np.ones(2)], "b": (np.ones(3), None)})
    prefix, groups = flat.split_by({"a": 1.0, "b": (2.0, None)})
    assert prefix.leaves == [1.0, 2.0]
    assert groups == [[0, 1], [2]]
    assert prefix.rebuild(["p", "q"]) == {"a": "p", "b": ("q", None)}
    with pytest.raises(ValueError, match="prefix of the tree"):
        flat.split_by({"a": [1.0], "b": 2.0})


def test_short_names_that_become_equal_are_numbered():
    assert dotted(("['a'][0]", "['a.0']", "['a']['0']", "")) == ("a.0", "a.0 (2)", "a.0 (3)", "all")
    assert dotted(("['a (2)']", "['a']", ".a")) == ("a (2)", "a", "a (3)")

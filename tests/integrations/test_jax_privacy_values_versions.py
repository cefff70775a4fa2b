"""The rule for NaN and infinities of the release of jax-privacy in use, each in a process of its own."""

import subprocess
import sys
import textwrap
from importlib import metadata

import pytest

from gradclip.integrations._jax_privacy_values import skips_whole_examples


def test_the_installed_release_decides():
    assert metadata.version("jax-privacy") == "2.0.0"
    assert not skips_whole_examples()


@pytest.mark.parametrize(
    ("version", "expected"),
    [("1.0.0", False), ("2.2.0", False), ("2.3.0.dev0", True), ("2.3.0", True), ("2.10.1", True), ("3.0", True)],
)
def test_a_loaded_release_decides(version, expected, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_privacy", type(sys)("jax_privacy"))
    sys.modules["jax_privacy"].__version__ = version
    assert skips_whole_examples() is expected


def test_without_it_the_newest_rule_holds(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.delitem(sys.modules, "jax_privacy", raising=False)
    monkeypatch.setattr(metadata, "version", missing)
    assert skips_whole_examples()


CODE = """
import sys, types
module = types.ModuleType("jax_privacy")
module.__version__ = "{version}"
sys.modules["jax_privacy"] = module
import jax, jax.numpy as jnp
from gradclip.integrations.jax_privacy import clip_pytree, clipped_fun
nan, inf = float("nan"), float("inf")
clipped, norm = clip_pytree([jnp.array([3.0, nan]), jnp.array([4.0])], 5.0)
print([x.tolist() for x in clipped], float(norm))
rows = jnp.array([[3.0, nan], [0.25, 0.5], [inf, 0.5]])
print(clipped_fun(lambda x: x, keep_batch_dim=False)(rows).round(3))
tree = clipped_fun(lambda x: {{"a": x[:1], "b": x[1:]}}, keep_batch_dim=False, return_norms=True,
                   l2_clip_norm={{"a": 1.0, "b": 1.0}})
for wrap in (lambda f: f, jax.jit):
    summed, norms = wrap(tree)(rows)
    print(summed["a"], summed["b"], norms["a"], norms["b"])
"""
WANTED = {
    "2.2.0": """\
        [[3.0, 0.0], [4.0]] 5.0
        [1.25 1.  ]
        [1.25] [1.] [3.   0.25 0.  ] [0.  0.5 0.5]
        [1.25] [1.] [3.   0.25 0.  ] [0.  0.5 0.5]
        """,
    "2.3.0": """\
        [[nan, nan], [nan]] nan
        [0.25 0.5 ]
        [0.25] [0.5] [3.   0.25  inf] [nan 0.5 0.5]
        [0.25] [0.5] [3.   0.25  inf] [nan 0.5 0.5]
        """,
}


@pytest.mark.parametrize("version", WANTED)
def test_what_the_rules_do(version):
    """Since 2.3 an example with NaN in one part is left out whole, whatever its other parts are."""
    code = CODE.format(version=version)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == textwrap.dedent(WANTED[version]), done.stderr

"""The command that runs jax-privacy's own tests of a checkout, on a small package in the place of jax-privacy."""

import pytest

import jax_privacy_suite

pytestmark = pytest.mark.slow

CLIPPING = """
def clip_pytree(tree, clip_norm):
    raise AssertionError("not replaced")
def clip_and_round_to_grid(): ...
def clipped_fun(): ...
def clipped_grad(): ...
"""
TEST = """
import jax.numpy as jnp
from jax_privacy import clipping
def test_replaced():
    assert float(clipping.clip_pytree(jnp.array([3.0, 4.0]), 1.0)[1]) == 5.0
def test_validate_args_empty_batch():
    assert False
"""


@pytest.fixture
def checkout(tmp_path):
    package, tests = tmp_path / "jax_privacy", tmp_path / "tests"
    package.mkdir()
    tests.mkdir()
    (package / "__init__.py").write_text("__version__ = '2.3.0'\n")
    (package / "clipping.py").write_text(CLIPPING)
    for name in jax_privacy_suite.FILES:
        (tests / f"{name}.py").write_text(TEST)
    return tmp_path


def test_the_functions_of_the_checkout_are_replaced(checkout):
    outcome, output = jax_privacy_suite.outcome_of(checkout, [])
    assert outcome["replaced"] == dict.fromkeys(
        ["clip_and_round_to_grid", "clip_pytree", "clipped_fun", "clipped_grad"], 1
    ), output
    assert {name.rpartition("::")[2] for name in outcome["passed"]} == {"test_replaced"}
    assert sorted(map(jax_privacy_suite.file_of, outcome["failed"])) == sorted(jax_privacy_suite.FILES)
    assert {name.rpartition("::")[2] for name in outcome["failed"]} <= set(jax_privacy_suite.REASONS)

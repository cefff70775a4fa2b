"""Eager calls in microbatches with JAX: traced once for each shape, with the results of a call that is not kept."""

import copy
import gc
import weakref
from collections import UserDict
from itertools import islice

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradclip
from compilations import compiled_in
from gradclip._src.private.batching import jax as jax_batching
from gradclip._src.private.batching.verbs import Programs

ROWS = jnp.asarray(np.random.default_rng(0).normal(size=(21, 5)), jnp.float32)
WEIGHTS = {"w": jnp.linspace(-1.0, 1.0, 5), "b": jnp.float32(0.3)}


class Counted:
    """A loss that counts how often it is traced."""

    def __init__(self):
        self.traces = 0

    def __call__(self, p, x, power=2, scale=1.0, link=jnp.tanh):
        self.traces += 1
        made = link(x @ p["w"].astype(x.dtype) + p["b"].astype(x.dtype))
        return (scale * made**power).sum(), {"rows": made}


def clipped_of(loss, max_norm=0.5, **settings):
    settings = {"microbatch_size": 8, "has_aux": True, "return_norms": True, "return_values": True} | settings
    return gradclip.clipped_grad(loss, max_norm, **settings)


def bits(tree):
    return [(x.dtype, x.weak_type, x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(tree)]


def traces_in(loss, call):
    before = loss.traces
    call()
    return loss.traces - before


def uncached(clipped, monkeypatch, *args, **kwargs):
    with monkeypatch.context() as patch:
        patch.setattr(jax_batching, "eager", lambda: False)
        return clipped(*args, **kwargs)


def calls():
    other = {"w": WEIGHTS["w"] * 3, "b": WEIGHTS["b"] - 1}
    mask = np.arange(21) % 3 > 0
    yield (WEIGHTS, ROWS), {"mask": mask}
    yield (other, ROWS), {"mask": np.arange(21) < 3}
    yield (other, ROWS), {}
    yield (other, np.asarray(ROWS, np.float64)), {}
    yield (WEIGHTS, ROWS), {"power": 3}
    yield (WEIGHTS, ROWS), {"scale": 0.0}
    yield (WEIGHTS, ROWS), {"scale": -0.0}
    yield (WEIGHTS, ROWS), {"scale": jnp.float32(-0.5)}
    yield (WEIGHTS, ROWS), {"scale": np.int64(2**40)}
    yield (WEIGHTS, ROWS), {"link": jnp.sin}


@pytest.mark.parametrize(
    ("settings", "number"),
    [({}, None), ({"max_norm": {"w": 0.1, "b": 2.0}, "pad_to": 24, "normalize_by": 3.0}, 2), ({"method": "loop"}, 2)],
    ids=["plain", "tree", "loop"],
)
def test_results_are_those_of_a_call_that_is_not_kept(settings, number, monkeypatch):
    clipped = clipped_of(Counted(), **settings)
    for args, kwargs in islice(calls(), number):
        expected = bits(uncached(clipped, monkeypatch, *args, **kwargs))
        assert bits(clipped(*args, **kwargs)) == expected
        assert bits(clipped(*args, **kwargs)) == expected


def test_traced_once_for_each_shape_and_dtype():
    loss = Counted()
    clipped = clipped_of(loss)
    changed = [{"w": WEIGHTS["w"] * i, "b": WEIGHTS["b"]} for i in range(5)]
    assert traces_in(loss, lambda: clipped(WEIGHTS, ROWS)) > 0
    assert traces_in(loss, lambda: [clipped(p, ROWS + 1) for p in changed]) == 0
    assert traces_in(loss, lambda: clipped(WEIGHTS, ROWS[:9])) > 0
    assert traces_in(loss, lambda: clipped(WEIGHTS, ROWS.astype(jnp.float16))) > 0
    assert traces_in(loss, lambda: clipped(WEIGHTS, ROWS, mask=np.arange(21) < 9)) > 0
    assert traces_in(loss, lambda: [clipped(WEIGHTS, ROWS, mask=np.arange(21) < i) for i in range(21)]) == 0
    assert traces_in(loss, lambda: clipped(WEIGHTS, ROWS, scale=jnp.float32(2))) > 0
    assert traces_in(loss, lambda: [clipped(WEIGHTS, ROWS, scale=jnp.float32(i)) for i in range(5)]) == 0
    assert traces_in(loss, lambda: (clipped(WEIGHTS, ROWS), clipped(WEIGHTS, ROWS[:9]))) == 0


def test_nothing_is_kept_by_a_further_call():
    clipped = clipped_of(Counted())
    clipped(WEIGHTS, ROWS)
    (program,) = clipped._programs.values()
    more = [ROWS + i for i in range(20)]
    assert compiled_in(lambda: [clipped(WEIGHTS, rows) for rows in more]) == 0
    assert list(clipped._programs.values()) == [program]
    assert program._cache_size() <= 1  # JAX may have dropped it: all programs of a process share its cache


def test_programs_are_few_and_go_with_the_function(monkeypatch):
    monkeypatch.setattr(Programs, "most", 2)
    loss = Counted()
    clipped = clipped_of(loss)
    for power in (1, 2, 3):
        clipped(WEIGHTS, ROWS, power=power)
    assert len(clipped._programs) == 2
    assert len(copy.deepcopy(clipped)._programs) == 0
    gone = weakref.ref(loss)
    del loss, clipped
    gc.collect()
    assert gone() is None


def test_random_keys_differ_between_calls(monkeypatch):
    loss = lambda p, x, key: ((x @ p) * jax.random.normal(key)).sum()
    clipped = gradclip.clipped_grad(loss, 0.5, prng_argnum=2, batch_argnums=1, microbatch_size=8)
    found = []
    for key in (jax.random.key(1), jax.random.key(2)):
        found.append(bits(clipped(WEIGHTS["w"], ROWS, key)))
        assert found[-1] == bits(uncached(clipped, monkeypatch, WEIGHTS["w"], ROWS, key))
    assert found[0] != found[1]


def test_a_threshold_in_an_array_and_values_that_are_looked_at():
    threshold = np.array(0.5)
    clipped = gradclip.clipped_grad(lambda p, x: (x @ p).sum(), {"w": threshold}, microbatch_size=8)
    loss = lambda p, x, k: (x @ p["w"]).sum() if float(k) > 0 else 2 * (x @ p["w"]).sum()
    looking = gradclip.clipped_grad(loss, 1e6, batch_argnums=1, microbatch_size=8)
    first, second, third = (looking({"w": WEIGHTS["w"]}, ROWS, jnp.float32(k)) for k in (1, -1, 1))
    np.testing.assert_allclose(second["w"], 2 * first["w"], rtol=1e-6)
    assert bits(first) == bits(third)
    assert len(clipped._programs) == 0


def test_mappings_of_other_kinds_follow_their_values():
    clipped = gradclip.clipped_grad(lambda p, b: (b["x"] @ p).sum(), 0.5, microbatch_size=8)
    plain = gradclip.clipped_grad(lambda p, x: (x @ p).sum(), 0.5, microbatch_size=8)
    for rows in (ROWS, ROWS * 2):
        assert bits(clipped(WEIGHTS["w"], UserDict(x=rows))) == bits(plain(WEIGHTS["w"], rows))


def test_under_transformations_and_with_what_is_traced_around_it():
    clipped = gradclip.clipped_grad(lambda p, x: (jnp.tanh(x @ p) ** 2).sum(), 0.5, microbatch_size=8)
    of = lambda p: clipped(p, ROWS).sum()
    p = WEIGHTS["w"]
    expected = of(p)
    np.testing.assert_allclose(jax.jit(of)(p), expected, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(of)(jnp.stack([p, p])), [expected] * 2, rtol=1e-6)
    assert jax.jvp(of, (p,), (p,))[0] == expected
    around = []
    closing = gradclip.clipped_grad(lambda p, x: around[-1] * (x @ p).sum(), 1e6, microbatch_size=8)

    def outer(c):
        around.append(c)
        return closing(p, ROWS).sum()

    once = [jax.jvp(outer, (c,), (1.0,))[0] for c in (1.0, 2.0)]
    once += [jax.vmap(outer)(jnp.array([3.0]))[0], jax.jit(outer)(4.0)]
    around.append(5.0)
    once.append(closing(p, ROWS).sum())
    np.testing.assert_allclose(once, once[0] * np.arange(1.0, 6.0), rtol=1e-5)


def test_double_precision_has_a_program_of_its_own():
    clipped = gradclip.clipped_fun(lambda x: jnp.asarray(x, float), 0.5, microbatch_size=8)
    narrow = clipped(ROWS)
    with jax.enable_x64(True):
        wide = clipped(ROWS)
    assert (narrow.dtype, wide.dtype, clipped(ROWS).dtype) == (jnp.float32, jnp.float64, jnp.float32)


def test_errors_are_those_of_the_function():
    clipped = gradclip.clipped_grad(lambda p, x: p @ x @ x, 0.5, microbatch_size=8)
    for _ in range(2):
        with pytest.raises(TypeError, match="dot_general"):
            clipped(WEIGHTS["w"], ROWS[:, :3])

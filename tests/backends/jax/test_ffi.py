"""Compiled JAX programs that call the kernels run in a process that has traced nothing."""

import json

import pytest

from fresh_process import run

CALLS = """
import jax, jax.numpy as jnp, numpy as np, gradclip
from jax.experimental import serialize_executable

CALLS = {
    "global": (lambda x: gradclip.clip_by_global_norm(x, 1.0), jnp.array([3.0, 4.0])),
    "largest": (lambda x: gradclip.global_norm(x, ord="inf"), jnp.array([3.0, -4.0])),
    "examples": (lambda x: gradclip.per_example_clip(x, 1.0)[0], jnp.array([[3.0, 4.0], [0.0, 0.5]])),
}
"""
RESULTS = [[[0.6, 0.8], 5.0], [4.0], [[0.6, 1.3]]]
WRITER = """
import pickle, sys
from pathlib import Path

for name, (function, x) in CALLS.items():
    compiled = jax.jit(function).lower(x).compile()
    assert "gradclip_" in compiled.as_text()
    Path(sys.argv[1], name).write_bytes(pickle.dumps(serialize_executable.serialize(compiled)))
"""
READER = """
import json, pickle, sys
from pathlib import Path

import jax, jax.numpy as jnp, numpy as np
from jax.experimental import serialize_executable

results = []
for name, x in (("global", [3.0, 4.0]), ("largest", [3.0, -4.0]), ("examples", [[3.0, 4.0], [0.0, 0.5]])):
    call = serialize_executable.deserialize_and_load(*pickle.loads(Path(sys.argv[1], name).read_bytes()))
    results.append([np.asarray(x, float).round(4).tolist() for x in jax.tree.leaves(call(jnp.array(x)))])
print(json.dumps(results))
"""
CACHED = """
import json, logging, sys

from jax._src import monitoring

events = []
monitoring.register_event_listener(lambda event, **_: events.append(event))
results = [[np.asarray(x, float).round(4).tolist() for x in jax.tree.leaves(jax.jit(f)(x))] for f, x in CALLS.values()]
print(json.dumps([results, events.count("/jax/compilation_cache/cache_hits")]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("executables")
    run(CALLS + WRITER, folder)
    return folder


@pytest.mark.parametrize(
    "imports",
    [
        "import jax.numpy, gradclip",
        "import gradclip, jax",
        # A look for the module must not lose what waits for it.
        "import gradclip, importlib.util, sys; assert importlib.util.find_spec('jax'); assert 'jax' not in sys.modules",
    ],
)
def test_serialized_programs_run_in_a_new_process(folder, imports):
    assert json.loads(run(imports + READER, folder)) == RESULTS


def test_programs_come_from_the_cache_of_another_process(tmp_path):
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first, none = json.loads(run(CALLS + CACHED, tmp_path, **settings))
    second, hits = json.loads(run(CALLS + CACHED, tmp_path, **settings))
    assert first == second == RESULTS
    assert hits >= none + 3


# XLA keeps a refusal to itself until it starts, and then does not start: it must never be asked in vain.
UNKNOWN = """
import jax, jax.ffi

asked = []
register = jax.ffi.register_ffi_target
jax.ffi.register_ffi_target = lambda name, *args, **kwargs: (asked.append(name), register(name, *args, **kwargs))
jax.ffi.include_dir = lambda: sys.argv[1]

import gradclip, jax.numpy as jnp

gradclip.clip_by_global_norm(np.ones(3), 1.0)
assert asked == []
jnp.ones(2)
gradclip.clip_by_global_norm(jnp.ones(3), 1.0)
assert asked == []
norm = jax.jit(gradclip.global_norm)
assert norm(jnp.array([3.0, 4.0])) == 5.0
assert len(asked) == 6 and "gradclip_" in norm.lower(jnp.ones(2)).compile().as_text()
"""


@pytest.mark.parametrize("version", ["0 4", "1 2", None])
def test_interfaces_that_may_refuse_the_kernels_are_asked_after_xla_started(tmp_path, version):
    if version is not None:
        header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
        header.parent.mkdir(parents=True)
        major, minor = version.split()
        header.write_text(f"#define XLA_FFI_API_MAJOR {major}\n\n#define XLA_FFI_API_MINOR {minor}\n")
    run("import sys, numpy as np\n" + UNKNOWN, tmp_path)

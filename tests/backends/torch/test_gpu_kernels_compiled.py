"""The kernels compiled ahead for GPUs of two generations, without one: how they load, store and round."""

import json
import re

import pytest

from fresh_process import run
from gradclip._src.core.coefficient import NARROW_LOWERED
from gradclip._src.core.rules import LOWERED

POINTERS = {
    "*i64": ("chunks", "addresses", "sources", "targets", "starts", "part_of"),
    "*fp64": ("partial", "limits"),
    "*fp32": ("norms", "factors"),
    "*i32": ("flags",),
    "*i8": ("shown",),
    "fp64": ("max_norm", "inflate", "times"),
    "i32": ("rows", "parts"),
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names}
SUMS = [{"order": order, "zero": zero} for order, zero in ((2, False), (2, True), (1, False), (0, False))]
LOWER = {"lowered": LOWERED, "narrow_lowered": NARROW_LOWERED}
DECISIONS = [
    {"order": 2, "step": -1, "show": True, "joint": False, "skip": False, **LOWER},
    {"order": 0, "step": 1, "show": False, "joint": True, "skip": True, **LOWER},
]
SCALES = [
    {"step": 2, "in_place": True, "zero": False, "rounding": 0},
    {"step": 0, "in_place": False, "zero": True, "rounding": 0},
    {"step": 2, "in_place": True, "zero": False, "rounding": 1},
]
KERNELS = {"sums": SUMS, "decide": DECISIONS, "scale": SCALES}
CODE = """
    import json, sys, warnings
    warnings.simplefilter("default")  # Triton announces a new default, which the kernels do not depend on
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from gradclip._src.backends.torch import gpu_kernels

    types, kernels = json.loads({types!r}), json.loads({kernels!r})
    found = []
    for name, each in kernels.items():
        kernel = getattr(gpu_kernels, name)
        for constants in each:
            constants["block"] = gpu_kernels.BLOCK
            signature = {{name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}}
            for generation in (80, 90):
                source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
                made = triton.compile(source, target=GPUTarget("cuda", generation, 32), options=gpu_kernels.OPTIONS)
                found.append([name, constants, generation, made.asm["ptx"], len(made.asm["cubin"])])
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("triton")
    code = CODE.format(types=json.dumps(TYPES), kernels=json.dumps(KERNELS))
    settings = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    found = json.loads(run(code, folder, **settings).splitlines()[-1])
    assert len(found) == 2 * sum(map(len, KERNELS.values()))
    return found


def of(compiled, *names):
    return [(constants, ptx) for name, constants, _, ptx, _ in compiled if name in names]


def test_every_kernel_becomes_machine_code(compiled):
    assert all(size > 1000 for *_, size in compiled)


def test_elements_are_loaded_and_stored_16_bytes_at_a_time(compiled):
    for _, ptx in of(compiled, "sums", "scale"):
        assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 3  # once for each dtype
    for _, ptx in of(compiled, "scale"):
        assert len(re.findall(r"st\.global\.v4\.b32", ptx)) >= 3


def test_subnormal_numbers_are_not_flushed(compiled):
    assert not [ptx for *_, ptx, _ in compiled if ".ftz" in ptx]


def test_no_product_of_elements_is_fused_with_an_addition(compiled):
    for _, ptx in of(compiled, "scale"):
        assert "fma" not in ptx
        assert "mul.f32" in ptx or "mul.rn.f32" in ptx


def test_division_and_root_are_rounded_to_nearest(compiled):
    for constants, ptx in of(compiled, "decide"):
        assert set(re.findall(r"\bdiv\.[\w.]*f\d+", ptx)) == {"div.rn.f64"}
        assert set(re.findall(r"\bsqrt\.[\w.]*", ptx)) == ({"sqrt.rn.f64"} if constants["order"] == 2 else set())


def test_squares_are_added_in_float64(compiled):
    for constants, ptx in of(compiled, "sums"):
        sums = set(re.findall(r"\b(?:add|fma|mul)\.[\w.]*f\d+", ptx))
        assert all(name.endswith("f64") for name in sums)
        assert bool(sums) == (constants["order"] > 0)

"""Compile every kernel of ours for a GPU, which takes none: python -m tests.kit.compile_kernels GPU [once].

GPU is the capability: 80, 90 or 100. Triton's interpreter takes programs that its compiler refuses. With
"once" each kernel is compiled for its first kind of values only.
"""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hpc_swe.models.deltas import delta_kernels, digest_kernels, placing_kernels
from hpc_swe.models.policies._megatron.kernels import triton_kernels

MODULES = delta_kernels, digest_kernels, placing_kernels, triton_kernels
CALLED = {"_larger", "_gaps", "_values", "_place", "_weights", "_angles"}
"""What kernels call; these are compiled with them."""
WARPS = 8
Kernel = tuple[JITFunction, str, dict[str, Any]]
"""A kernel, the types of its arguments but constants, separated by spaces, and the constants."""
NORMED = {"groups": 8, "size": 6, "d": 128, "is_normed": True, "heads_tile": 64, "half_tile": 64}


def kernels() -> Iterator[Kernel]:
    """Yield each kernel for each kind of values."""
    p, d, t, g = placing_kernels, delta_kernels, triton_kernels, digest_kernels
    long, block = "*i64", {"block": 4096}
    yield p._measure, f"{long} i32 *i32 {long} i32", block
    for size, (_, bits) in d.BITS.items():
        for flag in (True, False):
            width = {"bits": bits, "size": size, "is_aligned": flag}
            yield d._count, f"{long} {long} {long} i32 *i32", width | block
            where = f"{long} {long} {long} i32 *u8 *i{8 * size} {long} {long} {long} {long}"
            yield d._encode, where, width | block | {"is_narrow": flag}
            yield p._apply, f"{long} i32 *i32 {long} i32", {"dtype": bits, "is_narrow": flag} | block
            mask, height, wide = (1 << (8 * size)) - 1, g.TILE[0], g.TILE[1]
            tile = {"height": height, "width": wide, "block": g.TILE_BLOCK}
            tile |= {"dtype": bits, "size": size, "unit": g.VECTOR // size if flag else 1, "mask": mask}
            yield g._sum_tiles, f"{long} i32 *i32 {long} {long} {long}", tile
        rows = f"*i{8 * size} i32 {long} {long} {long} i32 i32"
        yield g._weighted_sums, rows, {"mask": mask, "group": g.ROWS, "block": g.BLOCK}
    for kind in ("*bf16", "*fp32"):
        yield t._add_rows, f"{kind} {long} {kind} i32", {"k": 8, "block": 2048}
        yield t._swiglu_forward, f"{kind} {kind} i32", {"block": t.SWIGLU_BLOCK}
        yield t._swiglu_backward, f"{kind} {kind} {kind} i32", {"block": t.SWIGLU_BLOCK}
        norm = " ".join([kind] * 5)
        yield t._norm_backward, f"{norm} *fp32 fp32 i32", {"width": 5120, "tile": 8192}
        for is_normed in (True, False):
            heads = " ".join([kind] * 3 + ["*fp32"] * 2 + [kind] * 3)
            constants = NORMED | {"is_normed": is_normed}
            yield t._heads_forward, f"{heads} fp32", constants
            yield t._heads_backward, f"{heads} {kind} *fp32 fp32 i32", constants


def all_of(module: ModuleType) -> set[str]:
    """Return the names of a module's own functions that Triton compiles."""
    return {
        n for n, f in vars(module).items() if isinstance(f, JITFunction) and f.__module__ == module.__name__
    }


def main() -> None:
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    done, is_once = set[str](), sys.argv[2:] == ["once"]
    for kernel, types, constants in kernels():
        if is_once and kernel.__name__ in done:
            continue
        given = iter(types.split())
        signature = {n: "constexpr" if n in constants else next(given) for n in kernel.arg_names}
        assert next(given, None) is None, kernel.__name__
        triton.compile(ASTSource(kernel, signature, constants), target, {"num_warps": WARPS})
        done.add(kernel.__name__)
    missing = set().union(*map(all_of, MODULES)) - done - CALLED
    assert not missing, f"not compiled: {sorted(missing)}"
    print(f"{len(done)} kernels", flush=True)


if __name__ == "__main__":
    main()

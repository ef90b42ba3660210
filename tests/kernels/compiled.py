"""Compile every Triton kernel for GPUs that are not there, and say what the machine code holds.

Not a test module: `test_compiled.py` runs it in processes of its own and reads one JSON object from each:
"case sm_90" → registers, spills, shared memory, and the tensor instructions, or what was raised.
    python tests/kernels/compiled.py --shard 0/1 [--core] [--word WORD]
--core takes one case of each kernel, for sm_90 only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from capplan.kernels import (
    copy_bandwidth,
    greedy_sampling,
    mla_decode,
    paged_attention_decode,
    quantize_rows,
    rmsnorm,
    rope,
    silu_mul,
    split_kv,
    w4a16_gemm,
    w8a8_gemm,
    w8a16_gemm,
    write_kv,
)

CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0))
NO_FP8_TYPE = ((8, 0),)
# What is a pointer, by parameter name; a case adds the ones whose type depends on it.
POINTERS = {
    "block_table": "*i32",
    "context_lens": "*i32",
    "positions": "*i32",
    "tokens": "*i32",
    "partial": "*fp32",
    "lse": "*fp32",
    "arrived": "*i32",
    "packed": "*u8",
    "zeros": "*u8",
    "table": "*fp32",
    "x_scales": "*fp32",
    "weight_scales": "*fp32",
}
FLOATS = {"score_scale", "value_scale", "key_scale", "out_scale", "eps", "top"}
# Sizes and strides that real shapes have in multiples of 16, which the launcher sees and uses.
ROUND = {"n", "k", "columns", "elements", "vocabulary", "columns_used"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel with one set of compile-time arguments, as its wrapper would launch it."""

    name: str
    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    warps: int = 4
    stages: int = 3
    tensor: str = ""  # a pattern of the tensor instructions that must be there
    floats: frozenset[str] = field(default_factory=frozenset)
    core: bool = False


def float_products(capability: tuple[int, int], *, wide: bool) -> str:
    """16-bit products; with 64 rows or more on the left, the warp-group or later kind where there is one."""
    if wide and capability == (9, 0):
        return r"HGMMA"
    if wide and capability == (10, 0):
        return r"UTCHMMA"
    return r"HMMA|HGMMA|UTCHMMA"


def paged_cases(capability: tuple[int, int]) -> list[Case]:
    variants: list[tuple[str, dict[str, Any]]] = [
        ("bf16", {"core": True}),
        ("bf16 one split, blocks of 32", {"single": True, "block_size": 32}),
        ("bf16 second launch, windowed", {"last_program": False, "block_size": 64, "windowed": True}),
        ("fp16 mha, one split", {"kind": "fp16", "group": 1, "block_size": 64, "single": True}),
        ("bf16 odd group, windowed", {"group": 7, "windowed": True}),
        ("bf16 32 heads a KV head", {"group": 32}),
        ("bf16 mqa of 71 heads", {"group": 71, "head_dim": 64}),
        ("bf16 mqa of 128 heads", {"group": 128, "single": True}),
        ("bf16 head of 64", {"head_dim": 64}),
        ("bf16 head of 96", {"head_dim": 96}),
        ("bf16 head of 256", {"head_dim": 256}),
        ("fp8", {"fp8": "bits"}),
        ("fp8 one split, windowed", {"fp8": "bits", "single": True, "windowed": True, "block_size": 64}),
        ("fp8 fp16 blocks of 32", {"fp8": "bits", "kind": "fp16", "block_size": 32}),
        ("fp8 head of 256", {"fp8": "bits", "head_dim": 256}),
        ("fp8 mqa of 71 heads", {"fp8": "bits", "group": 71, "head_dim": 64}),
    ]
    if capability not in NO_FP8_TYPE:
        variants.append(("fp8 native", {"fp8": "native"}))
    cases = []
    for name, changes in variants:
        chosen = {
            "kind": "bf16",
            "group": 4,
            "head_dim": 128,
            "block_size": 16,
            "windowed": False,
            "fp8": "no",
            "single": False,
            "last_program": True,
            "core": False,
            **changes,
        }
        kind, core = chosen.pop("kind"), chosen.pop("core")
        rows = max(16, 1 << (chosen["group"] - 1).bit_length())
        columns = 1 << (chosen["head_dim"] - 1).bit_length()
        tile = paged_attention_decode.choose_tile(
            head_dim=columns, rows=rows, fp8=chosen["fp8"] != "no", capability=capability
        )
        cache = {"no": f"*{kind}", "bits": "*u8", "native": "*fp8e4nv"}[chosen["fp8"]]
        cases.append(
            Case(
                name=f"paged_attention_decode {name}",
                kernel=paged_attention_decode.paged_decode_kernel,
                pointers={
                    "query": f"*{kind}",
                    "key_cache": cache,
                    "value_cache": cache,
                    "out": f"*{kind}",
                },
                constants={
                    **chosen,
                    "rows": rows,
                    "columns": columns,
                    "block_n": tile.block_n,
                    "stages": tile.stages,
                },
                warps=tile.warps,
                stages=tile.stages,
                tensor=float_products(capability, wide=False),
                core=core,
            )
        )
    for columns in (128, 256, 512):
        cases.append(
            Case(
                name=f"combine, {columns} columns",
                kernel=split_kv.combine_kernel,
                pointers={"out": "*bf16"},
                constants={"rows_size": 16, "columns_size": columns},
                core=columns == 128,
            )
        )
    return cases


def mla_cases(capability: tuple[int, int]) -> list[Case]:
    tile = mla_decode.choose_mla_tile(capability=capability)
    return [
        Case(
            name=f"mla_decode {name}",
            kernel=mla_decode.mla_decode_kernel,
            pointers={"query": "*bf16", "cache": cache, "out": "*bf16"},
            constants={
                "rows": mla_decode.ROWS,
                "latent": 512,
                "rope": 64,
                "block_size": 64,
                "block_n": tile.block_n,
                "fp8": fp8,
                "single": single,
                "last_program": True,
                "stages": tile.stages,
            },
            warps=tile.warps,
            stages=tile.stages,
            tensor=float_products(capability, wide=False),
            core=name == "bf16",
        )
        for name, cache, fp8, single in (
            ("bf16", "*bf16", "no", False),
            ("bf16 one split", "*bf16", "no", True),
            ("fp8", "*u8", "bits", False),
        )
    ]


def int4_cases(capability: tuple[int, int]) -> list[Case]:
    cases = []
    variants = [(m, group, False, "bf16") for m in (16, 32, 64, 128) for group in (32, 64, 128)]
    for m, group, symmetric, kind in [*variants, (16, 128, True, "bf16"), (16, 128, False, "fp16")]:
        tile = w4a16_gemm.choose_int4_tile(m=m, group=group)
        cases.append(
            Case(
                name=f"w4a16_gemm {kind} m={m} group={group}{' symmetric' if symmetric else ''}",
                kernel=w4a16_gemm.w4a16_kernel,
                pointers={"x": f"*{kind}", "scales": f"*{kind}", "out": f"*{kind}"},
                constants={
                    "block_m": tile.block_m,
                    "block_n": tile.block_n,
                    "group": group,
                    "symmetric": symmetric,
                    "swapped": tile.swapped,
                    "single": m == 64,
                    "stages": tile.stages,
                },
                warps=tile.warps,
                stages=tile.stages,
                tensor=float_products(capability, wide=True),
                core=(m, group) == (16, 128),
            )
        )
    for group, symmetric in ((32, False), (64, True), (128, False)):
        tile = w4a16_gemm.choose_int4_tile(m=1, group=group)
        cases.append(
            Case(
                name=f"w4a16_gemm gemv group={group}",
                kernel=w4a16_gemm.w4a16_gemv_kernel,
                pointers={"x": "*bf16", "scales": "*bf16", "out": "*bf16"},
                constants={
                    "block_n": w4a16_gemm.GEMV_BLOCK_N,
                    "group": group,
                    "symmetric": symmetric,
                    "single": False,
                    "stages": tile.stages,
                },
                warps=tile.warps,
                stages=tile.stages,
                core=group == 128,
            )
        )
    return cases


def eight_bit_cases(capability: tuple[int, int]) -> list[Case]:
    cases = []
    for m, fp8, kind in [
        *((m, fp8, "bf16") for m in (16, 32, 64, 128) for fp8 in (False, True)),
        (16, False, "fp16"),
    ]:
        tile = w8a16_gemm.choose_w8a16_tile(m=m)
        cases.append(
            Case(
                name=f"w8a16_gemm {'fp8' if fp8 else 'int8'} {kind} m={m}",
                kernel=w8a16_gemm.w8a16_kernel,
                pointers={
                    "x": f"*{kind}",
                    "weight": "*u8" if fp8 else "*i8",
                    "scales": "*fp32",
                    "out": f"*{kind}",
                },
                constants={
                    "block_m": tile.block_m,
                    "block_n": tile.block_n,
                    "block_k": tile.block_k,
                    "fp8": fp8,
                    "single": m == 64,
                    "stages": tile.stages,
                },
                warps=tile.warps,
                stages=tile.stages,
                tensor=float_products(capability, wide=True),
                core=m == 16 and kind == "bf16",
            )
        )
    for m in (16, 32, 64, 128):
        for kind in ("int8", "fp8", "fp8_bits"):
            if kind == "fp8" and capability in NO_FP8_TYPE:
                continue
            tile = w8a8_gemm.choose_w8a8_tile(m=m)
            pointer = {"int8": "*i8", "fp8": "*fp8e4nv", "fp8_bits": "*u8"}[kind]
            products = {"int8": "IMMA|IGMMA|UTCIMMA", "fp8_bits": "HMMA|HGMMA|UTCHMMA"}
            # With fewer rows Triton converts fp8 and multiplies as fp16 on sm_90.
            products["fp8"] = "QMMA|QGMMA|UTCQMMA" if m >= 64 else "QMMA|QGMMA|UTCQMMA|HMMA"
            cases.append(
                Case(
                    name=f"w8a8_gemm {kind} m={m}",
                    kernel=w8a8_gemm.w8a8_kernel,
                    pointers={"x": pointer, "weight": pointer, "out": "*bf16"},
                    constants={
                        "block_m": tile.block_m,
                        "block_n": tile.block_n,
                        "block_k": tile.block_k,
                        "kind": kind,
                        "single": m > 64,
                        "stages": tile.stages,
                    },
                    warps=tile.warps,
                    stages=tile.stages,
                    tensor=products[kind],
                    core=kind != "fp8_bits" and m == 16,
                )
            )
    return cases


def glue_cases(capability: tuple[int, int]) -> list[Case]:
    rows = {"x": "*bf16", "weight": "*bf16", "residual": "*bf16", "out": "*bf16"}
    cases = [
        Case(
            name=f"rmsnorm {columns}{' with residual' if adds else ''}",
            kernel=rmsnorm.rmsnorm_kernel,
            pointers=rows,
            constants={"block": columns, "adds": adds},
            warps=rmsnorm.warps_for(columns),
            core=columns == 4096,
        )
        for columns, adds in ((2048, False), (4096, True), (8192, True), (16384, True), (32768, False))
    ]
    cases.append(
        Case(
            name="silu_mul",
            kernel=silu_mul.silu_mul_kernel,
            pointers={"gate_up": "*bf16", "out": "*bf16"},
            constants={"block": silu_mul.BLOCK},
            core=True,
        )
    )
    cases.append(
        Case(
            name="rope",
            kernel=rope.rope_kernel,
            pointers={"query": "*bf16", "key": "*bf16"},
            constants={"block": 64},
            warps=1,
            core=True,
        )
    )
    cases.append(
        Case(
            name="greedy_sampling",
            kernel=greedy_sampling.greedy_sampling_kernel,
            pointers={"logits": "*bf16"},
            constants={"block": greedy_sampling.BLOCK},
            warps=8,
            core=True,
        )
    )
    cases.append(
        Case(
            name="copy_bandwidth",
            kernel=copy_bandwidth.copy_kernel,
            pointers={"source": "*i32", "target": "*i32"},
            constants={"block": copy_bandwidth.BLOCK},
            warps=8,
            core=True,
        )
    )
    for fp8 in (False, True):
        if fp8 and capability in NO_FP8_TYPE:
            continue
        cache = "*fp8e4nv" if fp8 else "*bf16"
        cases.append(
            Case(
                name=f"write_kv {'fp8' if fp8 else 'bf16'}",
                kernel=write_kv.write_kv_kernel,
                pointers={"key": "*bf16", "value": "*bf16", "key_cache": cache, "value_cache": cache},
                constants={"block_size": 16, "columns": 128, "fp8": fp8},
                warps=1,
                core=not fp8,
            )
        )
        cases.append(
            Case(
                name=f"quantize_rows {'fp8' if fp8 else 'int8'}",
                kernel=quantize_rows.quantize_rows_kernel,
                pointers={"x": "*bf16", "out": "*fp8e4nv" if fp8 else "*i8", "scales": "*fp32"},
                constants={"block": quantize_rows.BLOCK, "integer": not fp8},
                core=not fp8,
            )
        )
    return cases


def all_cases(capability: tuple[int, int]) -> list[Case]:
    """Every kernel in every configuration that its wrapper picks on this chip."""
    makers = (paged_cases, mla_cases, int4_cases, eight_bit_cases, glue_cases)
    return [case for make in makers for case in make(capability)]


def source(case: Case) -> ASTSource:
    """The kernel with its arguments' types, aligned as the launcher finds real tensors and sizes."""
    names = case.kernel.arg_names
    assert set(case.constants) <= set(names), set(case.constants) - set(names)
    signature, aligned = {}, {}
    for place, name in enumerate(names):
        pointer = case.pointers.get(name) or POINTERS.get(name)
        if name in case.constants:
            signature[name] = "constexpr"
            continue
        signature[name] = pointer or ("fp32" if name in FLOATS else "i32")
        if pointer or name in ROUND or ("stride" in name and name != "table_stride"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    return ASTSource(fn=case.kernel, signature=signature, constexprs=constants, attrs=aligned)


def facts(case: Case, capability: tuple[int, int]) -> dict[str, Any]:
    """Compile, disassemble, and read off what matters."""
    start = time.perf_counter()
    compiled = triton.compile(
        source(case),
        target=GPUTarget("cuda", capability[0] * 10 + capability[1], 32),
        options={"num_warps": case.warps, "num_stages": case.stages},
    )
    seconds = time.perf_counter() - start
    tool = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        code, usage = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-sass", "-res-usage")
        )
    return {
        "seconds": round(seconds, 2),
        "shared_bytes": compiled.metadata.shared,
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
        "stack_bytes": int(re.search(r"STACK:(\d+)", usage)[1]),  # type: ignore[index]
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
        "tensor": sorted(set(re.findall(r"\b((?:H|I|Q|B)G?MMA|UTC[A-Z]*MMA)\b", code))),
        "wanted": case.tensor,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shard", default="0/1")
    parser.add_argument("--core", action="store_true")
    parser.add_argument("--word", default="")
    arguments = parser.parse_args()
    shard, shards = (int(part) for part in arguments.shard.split("/"))
    work = [
        (f"{case.name} sm_{capability[0]}{capability[1]}", case, capability)
        for capability in (((9, 0),) if arguments.core else CAPABILITIES)
        for case in all_cases(capability)
        if (case.core or not arguments.core) and arguments.word in case.name
    ]
    results: dict[str, Any] = {}
    for name, case, capability in work[shard::shards]:
        assert name not in results, name
        try:
            results[name] = facts(case, capability)
        except Exception:
            results[name] = traceback.format_exc()
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main()

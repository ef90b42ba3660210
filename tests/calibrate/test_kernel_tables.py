"""Kernel tables: what a row becomes, which rows are left out and why, what a broken file says."""

from pathlib import Path

import pytest

from capplan.calibrate import kernel_tables
from capplan.calibrate.kernel_tables import causal_pairs
from capplan.calibrate.tables import Measured, Table
from capplan.errors import InputError

GEMM = "gpu,backend,backend_version,kernel,dtype,m,n,k,latency_ms\n"
DECODE = (
    "gpu,backend,backend_version,kernel,compute_dtype,kv_dtype,batch,num_heads,num_kv_heads,head_dim,"
    "window,context_len,latency_ms\n"
)
MOE = (
    "gpu,backend,backend_version,kernel,dtype,num_tokens,hidden,inter,top_k,num_experts,tp,ep,routing,"
    "latency_ms\n"
)


def read(folder: Path, name: str, text: str) -> tuple[list[Table], dict[str, int]]:
    """The tables of one file, and what was left out of it."""
    (folder / f"{name}.csv").write_text(text)
    measured = Measured()
    assert kernel_tables.read(folder, measured)
    left = {why: count for found in measured.counts.values() for why, count in found.excluded.items()}
    return measured.tables(), left


def test_a_gemm_row(tmp_path: Path) -> None:
    tables, left = read(tmp_path, "gemm", GEMM + "a100_sxm,trtllm,1.0.0,x,sq,16,4096,8192,0.05\n")
    (table,) = tables
    assert table.key == ("a100-sxm-80gb", "gemm", "int8", "trtllm")
    assert {name: column.tolist() for name, column in table.columns.items()} == {
        "m": [16],
        "n": [4096],
        "k": [8192],
        "copies": [6],
    }
    assert table.seconds.tolist() == [pytest.approx(5e-5)]
    assert (table.groups, left) == (("4096x8192",), {})


def test_rows_that_say_nothing_of_the_kernel_are_left_out(tmp_path: Path) -> None:
    rows = [
        "h100_sxm,vllm,0.24.0,x,fp8_block,1,4096,4096,0.06",  # a Python launch
        "l40s,trtllm,1.3.0,x,bfloat16,1,12288,4096,0.04",  # 100 MB in 40 µs: 2.5 TB/s of 0.864
        "l40s,trtllm,1.3.0,x,bfloat16,1,1024,1024,0.002",  # 6 copies of 2 MiB stay in the cache: kept
    ]
    tables, left = read(tmp_path, "gemm", GEMM + "\n".join(rows) + "\n")
    assert left == {kernel_tables.EAGER: 1, kernel_tables.IMPOSSIBLE: 1}
    assert [table.columns["n"].tolist() for table in tables] == [[1024]]


def test_a_window_bounds_what_decoding_reads(tmp_path: Path) -> None:
    row = "h100_sxm,vllm,0.24.0,x,bfloat16,fp8,4,32,8,64,128,4096,0.02\n"
    (table,), _ = read(tmp_path, "attention_decode", DECODE + row)
    assert table.dtype == "fp8"
    assert table.columns["kv_tokens"].tolist() == [4 * 128]


@pytest.mark.parametrize(
    ("length", "past", "window", "pairs"),
    [
        (4, 0, 0, 10),
        (4, 6, 0, 34),
        (4, 0, 2, 1 + 2 + 2 + 2),
        (4, 6, 2, 8),
        (4, 0, 9, 10),
        (3, 2, 4, 3 + 4 + 4),
    ],
    ids=["causal", "after six", "window of two", "window long full", "window not reached", "window reached"],
)
def test_causal_pairs(length: int, past: int, window: int, pairs: int) -> None:
    seen = [past + place + 1 for place in range(length)]
    assert sum(min(one, window or one) for one in seen) == pairs
    assert causal_pairs(length, past, window) == pairs


def test_experts_without_a_gate_are_known_by_a_kernel_of_that_gpu(tmp_path: Path) -> None:
    shape = "1.0,{},bfloat16,8,2048,5120,22,512,1,1,power_law_1.2,0.3"
    rows = [
        "b200_sxm,trtllm," + shape.format("moe_torch_flow_nongated"),
        "b200_sxm,vllm," + shape.format("other"),
        "a100_sxm,vllm," + shape.format("other"),
    ]
    tables, _ = read(tmp_path, "moe", MOE + "\n".join(rows) + "\n")
    assert {table.key[::3]: table.columns["gated"].tolist() for table in tables} == {
        ("a100-sxm-80gb", "vllm"): [1],
        ("b200-sxm-180gb", "trtllm"): [0],
        ("b200-sxm-180gb", "vllm"): [0],
    }
    assert {table.columns["skew"][0] for table in tables} == {1.2}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("h100_sxm,vllm,1,x,bfloat16,1,4096,4096,nan", "latency_ms: 'nan' is no such number"),
        ("h100_sxm,vllm,1,x,bfloat16,1,4096,4096,0", "latency_ms: a time of 0"),
        ("h100_sxm,vllm,1,x,bfloat16,0,4096,4096,1", "m: 0 is no count"),
        ("h100_sxm,vllm,1,x,bfloat16,1.5,4096,4096,1", "m: 1.5 is no count"),
        ("h100_sxm,vllm,1,x,int3,1,4096,4096,1", "dtype: 'int3' is not known"),
        ("h100_sxm,vllm,1,x,bfloat16,1,4096", "no k"),
        ("h900_sxm,vllm,1,x,bfloat16,1,4096,4096,1", "unknown gpu"),
    ],
    ids=["nan", "zero", "no rows", "half a row", "dtype", "cut off", "gpu"],
)
def test_a_broken_row_names_its_place(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, "gemm", GEMM + row + "\n")
    assert message in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "gemm.csv").write_bytes(b"gpu\xff\xfe,\n\xff")
    with pytest.raises(InputError, match="cannot be read"):
        kernel_tables.read(tmp_path, Measured())

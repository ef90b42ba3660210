"""Groups, blocks, tokens, concurrency and refusals beside what vLLM 0.32.0 computes: every row equal."""

from collections import Counter

import pytest

from capplan.engines.kv_question import KvQuestion
from capplan.engines.vllm_kv import KvPlan, plan_kv
from capplan.specs import Model
from capplan.units import GIB
from tests.accuracy import oracles
from tests.accuracy.oracles import Row

ROWS = 2907


def kv_bits(model: Model, dtype: str) -> int:
    """Width of a stored element: the row's dtype, else the checkpoint's own scheme."""
    own = model.quantization is not None and model.quantization.kv_format == "fp8"
    return 8 if dtype.startswith("fp8") or (dtype == "auto" and own) else 16


def plan_of(row: Row) -> KvPlan:
    """The plan of a row. The attention backend was forced: blocks of 16, MLA in fp8 of 64 tokens."""
    model = oracles.model_of(row)
    latents = "MLAAttention" in row["layers"]
    question = KvQuestion(
        kv_bits=kv_bits(model, row["kv_dtype"]),
        tp=int(row["tp"]),
        block_size=64 if latents and row["kv_dtype"].startswith("fp8") else 16,
        max_num_batched_tokens=int(row["max_num_batched_tokens"]),
    )
    return plan_kv(
        model,
        question,
        kv_bytes=int(row["kv_gib_per_rank"]) * GIB,
        max_model_len=int(row["max_model_len"]),
    )


def expected(row: Row) -> dict[str, object]:
    """What vLLM computed, in the plan's words."""
    if row["error"]:
        longest = row["fit_max_model_len_estimate"]
        return {
            "starts": False,
            "block_size": int(row["block_size"]),
            "need_gib": float(row["need_gib"]),
            "longest_model_len": int(longest) if longest else None,
        }
    return {
        "starts": True,
        "block_size": int(row["block_size"]),
        "groups": int(row["groups"]),
        "num_blocks": int(row["num_blocks"]),
        "tokens": int(row["kv_tokens"]),
        "max_concurrency": float(row["max_concurrency"]),
    }


def planned(plan: KvPlan) -> dict[str, object]:
    """The plan's figures as vLLM and the file round them."""
    figures = {name: getattr(plan, name) for name in KvPlan.__slots__}
    figures["need_gib"] = round(plan.need_bytes / GIB, 2)
    figures["max_concurrency"] = round(plan.max_concurrency, 6)
    return figures


@pytest.mark.usefixtures("data")
def test_every_row_is_what_vllm_computes(capsys: pytest.CaptureFixture[str]) -> None:
    total: Counter[str] = Counter()
    equal: Counter[str] = Counter()
    different: list[str] = []
    for row in oracles.rows("kv"):
        got, want = planned(plan_of(row)), expected(row)
        wrong = {name: (got[name], value) for name, value in want.items() if got[name] != value}
        total[row["model"]] += 1
        equal[row["model"]] += not wrong
        if wrong:
            asked = " ".join(row[name] for name in ("tp", "kv_dtype", "kv_gib_per_rank", "max_model_len"))
            different.append(f"{row['model']} {asked}: {wrong}")
    with capsys.disabled():
        print(f"\nkv.csv rows equal to vLLM 0.32.0: {equal.total()} / {total.total()}")
        for model, rows in sorted(total.items()):
            print(f"  {model}: {equal[model]} / {rows}")
    assert not different, "\n".join(different[:20])
    assert total.total() == ROWS


@pytest.mark.usefixtures("data")
def test_state_sizes_are_vllms() -> None:
    for row in oracles.rows("kv"):
        if row["state_bytes_per_seq"] == "0":
            continue
        plan = plan_of(row)
        states = [line for line in plan.layers if "state of" in line]
        assert len(states) == 1
        count, text = states[0].split(" × state of ")
        sizes = [int(size.replace(",", "").removesuffix(" B")) for size in text.split(" padded to ")]
        assert int(count) * sizes[0] == int(row["state_bytes_per_seq"])
        assert int(count) * sizes[-1] == int(row["state_bytes_per_seq_padded"])

"""The replay door, and vLLM's scheduler against its own logs: every step, every column."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from capplan.errors import DoesNotFitError, InputError
from capplan.sim import simulator
from capplan.sim.replay import LinearTimes, LoggedRequests, read_limits
from capplan.sim.replica import Replica, Step
from capplan.sim.request import Request
from capplan.sim.schedulers.vllm_v1 import vllm_v1
from tests.accuracy import oracles

LOGS = oracles.DATA / "oracles" / "scheduler"
NAMES = sorted(path.stem for path in LOGS.glob("*.json"))
LIMITS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 100,
    "num_blocks": 11,
    "block_size": 4,
    "step_base_us": 1000,
    "us_per_prefill_token": 10.0,
    "us_per_decode_seq": 100.0,
    "us_per_ctx_token": 0.5,
}


class Rows:
    """Keeps every step as a log writes it."""

    def __init__(self) -> None:
        self.rows: list[dict[str, int]] = []
        self.requests: dict[int, Request] = {}
        self.rejections: list[int] = []

    def steps(
        self, replica: Replica, step: Step, count: int, start_s: float, end_s: float, done: list[Request]
    ) -> None:
        self.requests |= {request.index: request for request in done}
        self.rows.append(
            {
                "step": len(self.rows),
                "start_us": int(start_s),
                "end_us": int(end_s),
                "sched_tokens": step.decoding + step.prompt_tokens,
                "prefill_tokens": step.prompt_tokens,
                "prefill_reqs": step.prompt_sequences,
                "decode_reqs": step.decoding,
                "decode_ctx_tokens": step.kv_tokens,
                "new_reqs": sum(request.first_scheduled_s == start_s for request, _, _ in step.chunks),
                "resumed_reqs": step.resumed,
                "running": len(replica.running) + len(done),
                "waiting": len(replica.waiting),
                "preempted": len(step.preempted),
                "finished": len(done),
                "kv_blocks_used": step.kv_blocks,
                "kv_blocks_total": replica.blocks.total,
                "tokens_out": step.made_tokens,
            }
        )

    def rejected(self, request: Request, now_s: float) -> None:
        self.rejections.append(request.index)


def replayed(requests: Path, limits: Path) -> Rows:
    """Every step of a log by itself."""
    logged, rows = read_limits(limits), Rows()
    replica = Replica(logged.limits)
    replica.leaps = False  # type: ignore[misc]
    simulator.run(
        workload=LoggedRequests(requests, logged.prefix),
        replica=replica,
        scheduler=vllm_v1,
        times=logged.times,
        recorder=rows,
    )
    return rows


@pytest.mark.skipif(not NAMES, reason="no scheduler logs beside this checkout")
@pytest.mark.parametrize("name", NAMES)
def test_every_step_of_vllms_log(name: str) -> None:
    rows = replayed(LOGS / f"{name}.requests.csv", LOGS / f"{name}.json")
    with (LOGS / f"{name}.steps.csv").open() as stream:
        logged = [{key: int(value) for key, value in row.items()} for row in csv.DictReader(stream)]
    assert rows.rows == logged
    with (LOGS / f"{name}.requests.csv").open() as stream:
        for row in csv.DictReader(stream):
            found = rows.requests[int(row["id"])]
            assert found.first_token_s == int(row["first_token_us"])
            assert found.done_s == int(row["done_us"])
            assert found.preemptions == int(row["preemptions"])
            assert found.cached_tokens == int(row["cached_tokens"])


def written(folder: Path, limits: dict[str, Any], requests: str) -> Rows:
    """A log made here, replayed."""
    (folder / "log.json").write_text(json.dumps(limits))
    (folder / "log.requests.csv").write_text(requests)
    return replayed(folder / "log.requests.csv", folder / "log.json")


def test_a_log_worked_by_hand(tmp_path: Path) -> None:
    """Prompts of 10 and 6, answers of 3 and 2; 1000 + 10 · prompt + 100 · decoding + 0.5 · contexts."""
    rows = written(tmp_path, LIMITS, "id,arrival_us,prompt_tokens,output_tokens\n0,0,10,3\n1,500,6,2\n").rows
    assert [row["end_us"] for row in rows] == [1100, 1100 + 1165, 1100 + 1165 + 1208]
    assert [row["decode_reqs"] for row in rows] == [0, 1, 2]
    # 10 tokens: 3 blocks; then 11 and 6: 3 + 2; then 12 and 7.
    assert [row["kv_blocks_used"] for row in rows] == [3, 5, 5]
    assert [row["tokens_out"] for row in rows] == [1, 2, 2]


def test_priority_throws_out_the_lowest_first(tmp_path: Path) -> None:
    """Two prompts of 7 fill four blocks of 4; the first one's third token needs a fifth: one must go."""
    limits = LIMITS | {"num_blocks": 5, "policy": "priority", "max_num_batched_tokens": 50}
    text = "id,arrival_us,prompt_tokens,output_tokens,priority\n0,0,7,5,1\n1,1,7,5,0\n"
    rows = written(tmp_path, limits, text)
    assert rows.requests[0].preemptions == 1
    assert rows.requests[1].preemptions == 0
    rows = written(tmp_path, limits | {"policy": "fcfs"}, text)
    assert rows.requests[0].preemptions == 0
    assert rows.requests[1].preemptions == 1


def test_requests_that_throw_each_other_out_for_ever_are_an_error(tmp_path: Path) -> None:
    """By priority, in pieces of 5 and without reservation, two prompts of 51 and 75 never both get on."""
    limits = LIMITS | {
        "max_num_seqs": 3,
        "num_blocks": 25,
        "policy": "priority",
        "reserve_full": 0,
        "long_prefill_threshold": 5,
    }
    lengths = [(0, 35, 37), (0, 36, 15), (20000, 51, 19), (20000, 39, 37), (20000, 38, 8), (40000, 5, 28)]
    lengths += [(40900, 7, 5), (41800, 25, 11), (41860, 47, 17), (41860, 7, 32), (61860, 22, 37)]
    ranks = [2, 2, 2, 2, 1, 0, 0, 0, 0, 0, 2]
    rows = [
        f"{at},{a},{p},{o},{rank}" for at, ((a, p, o), rank) in enumerate(zip(lengths, ranks, strict=True))
    ]
    text = "\n".join(["id,arrival_us,prompt_tokens,output_tokens,priority", *rows])
    with pytest.raises(DoesNotFitError, match="throw each other out"):
        written(tmp_path, limits, text + "\n")


def test_requests_that_never_fit_are_rejected(tmp_path: Path) -> None:
    """10 blocks of 4 tokens: 41 tokens with their last one not stored just fit, 42 do not."""
    text = "id,arrival_us,prompt_tokens,output_tokens\n0,0,30,11\n1,0,30,12\n2,0,4,1\n"
    rows = written(tmp_path, LIMITS, text)
    assert rows.rejections == [1]
    assert sorted(rows.requests) == [0, 2]


def test_answers_end_at_the_longest_context(tmp_path: Path) -> None:
    text = "id,arrival_us,prompt_tokens,output_tokens\n0,0,10,9\n1,0,16,2\n"
    rows = written(tmp_path, LIMITS | {"max_model_len": 16}, text)
    assert rows.requests[0].output_tokens == 6
    assert rows.requests[0].truncated
    assert rows.rejections == [1]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"num_blocks": 1}, "num_blocks is 1"),
        ({"block_size": 1.5}, "block_size is 1.5"),
        ({"step_base_us": -1}, "step_base_us is -1"),
        ({"us_per_ctx_token": "a"}, "us_per_ctx_token is"),
        ({"policy": "lifo"}, "policy"),
        ({"max_num_batched_tokens": None}, "max_num_batched_tokens is missing"),
    ],
)
def test_limits_out_of_range_are_named(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        written(tmp_path, LIMITS | change, "id,arrival_us,prompt_tokens,output_tokens\n0,0,1,1\n")


@pytest.mark.parametrize("text", ["", "[1]", "{", "nul", '{"a": NaN}'])
def test_a_limits_file_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "limits.json"
    path.write_text(text)
    with pytest.raises(InputError):
        read_limits(path)


def test_steps_in_a_row_are_rounded_each() -> None:
    """0.3 µs a context token: 10 → 3, 11 → 3 (3.3), 12 → 4 (3.6)."""
    times = LinearTimes(base=0.0, prompt_token=0.0, decode_sequence=0.0, context_token=0.3)
    assert times.steps_s(1, 10, 3, 1e9) == (3, 10)
    assert times.steps_s(1, 10, 3, 6) == (2, 6)

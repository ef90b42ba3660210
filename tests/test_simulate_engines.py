"""What engines bring to a simulation: slots, batches, options of schedulers, memory that is reserved."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capplan.errors import InputError
from capplan.sim.schedulers import scheduler_of
from capplan.simulate_answer import Simulation
from capplan.simulate_estimate import simulate

LLAMA: dict[str, Any] = {"engine": "llama.cpp", "precision": "q4_k_m"}


def served(**fields: Any) -> Simulation:
    return simulate("8b", gpu="h100", price_usd_per_gpu_hour=2.5, **fields)


@pytest.mark.parametrize("scheduler", ["static", "hf_generate"])
def test_a_batch_has_no_default_size(scheduler: str) -> None:
    with pytest.raises(InputError, match="size that nobody gave") as caught:
        served(request_per_s=4, requests=50, scheduler=scheduler)
    assert "--max-num-seqs" in caught.value.hint


@given(
    scheduler=st.sampled_from(["vllm_v1", "static", "hf_generate", "orca"]),
    requests=st.integers(1, 40),
    rate=st.sampled_from([0.01, 1.0, 100.0]),
    batch=st.integers(1, 64),
)
@settings(max_examples=25, deadline=None)
def test_a_run_that_served_has_a_rate(scheduler: str, requests: int, rate: float, batch: int) -> None:
    made = served(
        request_per_s=rate,
        requests=requests,
        scheduler=scheduler,
        max_num_seqs=batch,
        isl=64,
        osl=16,
        bounds=True,
    )
    summary = made.summary
    assert summary.requests == requests
    assert summary.request_per_s > 0
    assert summary.output_token_per_s > 0
    assert summary.batch > 0
    assert 0 < summary.busy <= 1


def test_llama_cpp_has_the_slots_of_its_own_default() -> None:
    made = served(request_per_s=2, requests=40, **LLAMA)
    # b7000 and later: 4 slots; each holds the longest request, 1,280 tokens.
    assert (made.limits.max_num_seqs, made.limits.max_num_batched_tokens) == (4, 2048)
    assert made.limits.kv_blocks * made.limits.block_size == 4 * 1280
    assert max(made.summary.series.running) <= 4
    assert any("--parallel 4 --ctx-size 5120" in note and "without --parallel" in note for note in made.notes)
    old = served(request_per_s=0.2, requests=20, engine_version="b6000", **LLAMA)
    assert old.limits.max_num_seqs == 1


@pytest.mark.parametrize("slots", [1, 4, 8])
def test_llama_cpp_has_as_much_cache_as_its_slots(slots: int) -> None:
    made = served(request_per_s=1, requests=20, max_num_seqs=slots, **LLAMA)
    assert made.limits.max_num_seqs == slots
    assert made.limits.kv_blocks * made.limits.block_size == slots * 1280
    users = served(concurrency=slots, requests=20, **LLAMA)
    assert users.limits == made.limits
    assert any("a slot a user" in note for note in users.notes)


def test_slots_of_llama_cpp_share_no_prefix() -> None:
    made = served(request_per_s=1, requests=20, prefix_shared=512, **LLAMA)
    assert made.summary.cached_tokens == 0
    assert not made.limits.prefix_caching


def test_tgi_is_limited_by_tokens_and_by_what_it_is_told() -> None:
    free = served(requests=400, engine="tgi", isl=100, osl=400)
    assert free.limits.max_num_seqs == free.limits.kv_blocks * free.limits.block_size
    assert max(free.summary.series.running) > 256
    told = served(requests=400, engine="tgi", isl=100, osl=400, max_num_seqs=8)
    assert max(told.summary.series.running) <= 8


@pytest.mark.parametrize("engine", ["tensorrt-llm", "tgi"])
def test_what_clients_ask_at_most_is_reserved(engine: str) -> None:
    load: dict[str, Any] = {"requests": 120, "isl": 256, "osl": 64, "engine": engine, "kv_blocks": 2000}
    load["block_size"] = 16
    plain, asked = served(**load), served(**load, max_new_tokens=4096)
    # 2,000 blocks of 16: 319 tokens are 20 blocks, 100 at once; 256 + 4,095 are 272, 7 at once.
    assert max(plain.summary.series.running) > 60
    assert max(asked.summary.series.running) <= 7
    assert asked.limits.max_model_len == 256 + 64 + 4096
    assert asked.load.stable_request_per_s < plain.load.stable_request_per_s / 2
    assert asked.summary.output_tokens == plain.summary.output_tokens


@pytest.mark.parametrize("fields", [{}, {"engine": "tensorrt-llm", "scheduler": "trtllm_max_utilization"}])
def test_who_reserves_nothing_takes_no_such_number(fields: dict[str, str]) -> None:
    with pytest.raises(InputError, match="does not go by what clients ask"):
        served(request_per_s=4, max_new_tokens=1000, **fields)


@pytest.mark.parametrize(
    ("engine", "options", "given"),
    [
        (
            "tgi",
            "waiting_served_ratio=1.2,max_waiting_tokens=5",
            {"waiting_served_ratio": 1.2, "max_waiting_tokens": 5},
        ),
        ("sglang", "enable-mixed-chunk=true", {"enable_mixed_chunk": True}),
        ("sglang", "schedule_policy=LPM", {"schedule_policy": "lpm"}),
        ("trtllm", "chunked_context=true", {"chunked_context": True}),
        ("llama.cpp", "cont_batching=false", {"cont_batching": False}),
        ("vllm", "", {}),
    ],
)
def test_a_scheduler_is_told_its_options(engine: str, options: str, given: dict[str, Any]) -> None:
    policy = scheduler_of(f"{engine}:{options}")
    assert policy.given == given
    scheduler = policy.make()
    for name, value in given.items():
        found = getattr(scheduler, name, None)
        assert (scheduler.keywords[name] if found is None else found) == value  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tgi:waiting_served=1", "no option 'waiting_served'"),
        ("tgi:waiting_served_ratio", "is not option=value"),
        ("tgi:waiting_served_ratio=-1", "no number from 0 up"),
        ("tgi:waiting_served_ratio=nan", "no number from 0 up"),
        ("tgi:waiting_served_ratio=1e9", "is 1e\\+09"),
        ("tgi:max_waiting_tokens=1.5", "no whole number"),
        ("tgi:max_waiting_tokens=1,max_waiting_tokens=2", "given twice"),
        ("sglang:schedule_policy=fifo", "schedule_policy is 'fifo'"),
        ("sglang:enable_mixed_chunk=yes", "enable_mixed_chunk is 'yes'"),
        ("vllm_v1:watermark=1", "no option 'watermark'"),
    ],
)
def test_a_bad_option_is_named(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        scheduler_of(text)
    assert caught.value.where == "--scheduler"


def test_options_change_the_steps() -> None:
    load: dict[str, Any] = {"request_per_s": 10, "requests": 200, "engine": "sglang"}
    plain, mixed = served(**load), served(**load, scheduler="sglang:enable_mixed_chunk=true")
    assert plain.summary.spreads["itl_s"] != mixed.summary.spreads["itl_s"]
    assert mixed.to_dict()["scheduler"]["options"] == {"enable_mixed_chunk": True}
    assert mixed.policy.title == "sglang enable_mixed_chunk=true"


def test_prompts_longer_than_a_step_need_chunks() -> None:
    load: dict[str, Any] = {"request_per_s": 1, "requests": 10, "isl": 10_000, "engine": "tensorrt-llm"}
    with pytest.raises(InputError, match="every request was rejected"):
        served(**load)
    assert served(**load, scheduler="trtllm:chunked_context=true").summary.requests == 10


def test_drafts_run_under_schedulers_that_reserve() -> None:
    load: dict[str, Any] = {"request_per_s": 2, "requests": 100, "engine": "tensorrt-llm"}
    plain, made = served(**load), served(**load, speculative_tokens=3, acceptance_rate=0.7)
    plain_tpot, tpot = plain.summary.spreads["tpot_s"], made.summary.spreads["tpot_s"]
    assert plain_tpot is not None
    assert tpot is not None
    assert tpot.mean < plain_tpot.mean / 1.5

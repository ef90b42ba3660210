"""`vram` with an engine: the engine's terms instead of the rule of thumb, its pool, its verdict."""

import json
from typing import Any

import pytest

from capplan import estimate
from capplan.cli import run
from capplan.engines.plan import ENGINES, EngineFlags
from capplan.errors import InputError


def asked(gpu: str = "h100", engine: str | None = "vllm", **fields: Any) -> estimate.VramEstimate:
    flags = EngineFlags(**fields)
    return estimate.vram(
        "8b", gpus=(gpu,), users=8, context=4096, engine=engine, engine_flags=flags if engine else None
    )


def test_terms_take_the_place_of_the_rule_of_thumb() -> None:
    answer = asked(version="0.24")
    plan = answer.engine
    assert plan is not None
    names = [part["name"] for part in answer.need.overhead.parts()]
    assert names == ["activation", "non_torch", "cuda_graphs"]
    verdict = answer.verdicts[0]
    assert verdict.usable_bytes == plan.terms["budget"]
    assert verdict.headroom_bytes == plan.kv_pool.value - (answer.need.kv_bytes or 0) - answer.need.tail_bytes
    assert answer.fits is True


def test_json_has_the_plan_and_the_pool_of_it() -> None:
    found = asked().to_dict()
    engine = found["engine"]
    assert engine["name"] == "vllm"
    assert engine["starts"] is True
    assert found["per_gpu"]["kv_pool"] == {
        "bytes": engine["kv_pool"]["bytes"],
        "tokens": engine["kv_tokens"],
    }
    assert found["per_gpu"]["max_concurrency"] == engine["max_concurrency"]
    json.dumps(found, allow_nan=False)


def test_without_an_engine_there_is_no_block() -> None:
    assert "engine" not in asked(engine=None).to_dict()


def test_a_refusal_is_no_fit_though_the_users_would() -> None:
    # 131,072 tokens, the model's own limit, need 16 GiB; two users of 4,096 need 1 GiB.
    answer = estimate.vram("8b", gpus=("l4",), users=2, context=4096, engine="vllm")
    assert answer.engine is not None
    assert answer.engine.starts is False
    assert answer.fits is False
    assert answer.verdicts[0].headroom_bytes > 0


def test_users_beyond_the_pool_do_not_fit_though_it_starts() -> None:
    answer = estimate.vram("8b", gpus=("h100",), users=64, context=8192, engine="vllm")
    assert answer.engine is not None
    assert answer.engine.starts is True
    assert answer.fits is False


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_every_engine_adds_up(engine: str) -> None:
    answer = asked(engine=engine, max_model_len=8192)
    assert answer.engine is not None
    verdict = answer.verdicts[0]
    own = answer.need.total_bytes - (answer.need.kv_bytes or 0) - answer.need.tail_bytes
    assert own + max(0, answer.engine.kv_pool.value) == verdict.usable_bytes
    assert verdict.usable_bytes <= 80 * 10**9 * 1.08


def test_cli_exit_codes(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["vram", "--model", "8b", "--gpu", "l4", "--engine", "vllm"]) == 4
    assert "refuses" in capfd.readouterr().out
    started = ["vram", "--model", "8b", "--gpu", "h100", "--engine", "vllm", "--users", "4"]
    assert run([*started, "--max-num-seqs", "256"]) == 0
    out = capfd.readouterr().out
    assert "starts" in out
    assert "max_num_seqs 256" in out
    assert "max_num_seqs 256 (default)" not in out


@pytest.mark.parametrize(
    "options",
    [
        ["--max-num-seqs", "8"],
        ["--engine", "vllm", "--overhead", "10%"],
        ["--gpu-layers", "8"],
        ["--engine", "vllm", "--gpu-layers", "8"],
        ["--engine", "llama.cpp", "--gpu-layers", "-1"],
        ["--engine", "llama.cpp", "--gpu-layers", "many"],
        ["--engine", "all", "--engine-version", "0.24"],
        ["--engine", "all", "--gpu-layers", "8"],
        ["--engine", "vllm", "--gpu-memory-utilization", "1.5"],
        ["--engine", "vllm", "--max-model-len", "1024", "--context", "4096"],
        ["--engine", "other"],
    ],
)
def test_options_that_contradict_each_other(options: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["vram", "--model", "8b", "--gpu", "l4", *options]) == 2
    assert capfd.readouterr().err.startswith("error: ")


def test_an_engine_needs_a_gpu_and_a_model() -> None:
    with pytest.raises(InputError, match="needs a GPU"):
        estimate.vram("8b", engine="vllm")
    with pytest.raises(InputError, match="layers"):
        estimate.vram(params=8 * 10**9, gpus=("h100",), engine="vllm")


def test_users_beyond_the_sequences_wait() -> None:
    answer = asked(max_num_seqs=4)
    assert answer.engine is not None
    assert any("the others wait" in note for note in answer.engine.notes)


def test_a_default_context_is_within_what_the_engine_admits() -> None:
    flags = EngineFlags(max_model_len=1024)
    assert estimate.vram("8b", gpus=("h100",), engine="vllm", engine_flags=flags).question.context == 1024


def test_a_stage_whose_layers_read_caches_elsewhere_is_refused() -> None:
    from capplan.engines.plan import EngineFlags
    from capplan.errors import InputError
    from capplan.estimate import vram

    with pytest.raises(InputError, match="no cache of their own"):
        vram("gemma-4-e2b", pp=2, gpus=("h100",), engine="vllm", engine_flags=EngineFlags())

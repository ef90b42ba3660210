"""Every key of a scenario file: what it may hold, what it means, and which option of the commands it is.

The one table that the loader (scenario.py) and the JSON Schema (schema.py) are made from.
"""

from dataclasses import dataclass
from typing import Final

from capplan.scenario_values import (
    COUNT,
    DAY,
    FROM_ZERO,
    SIZE,
    SIZE_UNITS,
    TIME,
    TIME_UNITS,
    TOKENS,
    WHOLE,
    Either,
    Flag,
    Kind,
    Many,
    Number,
    Text,
)

VERSION: Final = 1
ANSWERS: Final = ("vram", "latency", "cost")
"""What an expectation may be about: the commands whose output it names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key: its kind, its meaning, and the option it stands for (by default its own name)."""

    kind: Kind
    doc: str
    option: str | None = None


def _key(kind: Kind, doc: str, option: str | None = None) -> Key:
    return Key(kind=kind, doc=doc, option=option)


KEYS: Final[dict[str, Key]] = {
    "name": _key(Text(example="chat on one GPU"), "Title in reports; the file's name by default."),
    "model": _key(Text(example="meta-llama/Llama-3.1-8B-Instruct"),
                  "Catalog name or size (8b), or a path relative to this file."),
    "params": _key(COUNT, "Parameter count instead of a model: 70b."),
    "kv_from": _key(Text(example="8b"), "Model whose KV cache goes with params."),
    "precision": _key(Text(example="fp8"), "Weight format; auto: the checkpoint's."),
    "kv_dtype": _key(Text(example="auto"), "KV cache dtype; auto: the checkpoint's, else 16-bit."),
    "block_size": _key(WHOLE, "Tokens of a KV block."),
    "overhead": _key(SIZE, "Instead of the rule of thumb: 1.5GB."),
    "overhead_percent": _key(Number(high=1000), "The same as a share of the weights.", "overhead"),
    "lora": _key(Many(of=Text(example="rank=16,targets=q_proj")), "Adapters: a path each, or its shape."),
    "lora_slots": _key(WHOLE, "Adapters served at once."),
    "draft_model": _key(Text(example="mtp"), "Draft model: a name, a path, or mtp."),
    "services": _key(Many(of=Text(example="8b:gpu_memory_utilization=0.3")),
                     "Started after it on the same GPU: MODEL[:gpu_memory_utilization=0.3,…].", "with"),
    "calibration": _key(Text(example="shipped"), "shipped, or a file relative to this one."),
    "engine.name": _key(Text(example="vllm"), "vllm (default), sglang, tensorrt-llm, tgi, llama.cpp.",
                        "engine"),
    "engine.version": _key(Text(example="0.24"), 'Its version, in quotes: "0.24".', "engine-version"),
    "engine.gpu_memory_utilization": _key(Number(above=True, high=1), "Its memory fraction."),
    "engine.max_num_seqs": _key(WHOLE, "Sequences a step."),
    "engine.max_num_batched_tokens": _key(TOKENS, "Tokens a step."),
    "engine.max_model_len": _key(TOKENS, "Longest request it admits."),
    "engine.enforce_eager": _key(Flag(), "No CUDA graphs."),
    "engine.gpu_layers": _key(Number(whole=True, word="all"), "llama.cpp: layers on the GPU, or all."),
    "fleet.gpu": _key(Text(example="h100-sxm", refused=("local", "all"), why="name one GPU of the catalog: "
                           "the answer must be the same on every machine"), "GPU of the catalog."),
    "fleet.gpu_memory": _key(SIZE, "Memory of a GPU that is not in the catalog."),
    "fleet.tp": _key(WHOLE, "GPUs that share each layer (tensor parallel)."),
    "fleet.pp": _key(WHOLE, "Pipeline stages."),
    "fleet.pp_layers": _key(Many(of=WHOLE), "Layers of each stage."),
    "fleet.ep": _key(WHOLE, "Ranks that divide the experts."),
    "fleet.dp": _key(WHOLE, "Attention replicas that share the experts."),
    "fleet.replicas": _key(WHOLE, "Servers that share the load evenly (1)."),
    "fleet.price.usd_per_gpu_hour": _key(Number(above=True, high=1000), "A price of your own.", "price"),
    "fleet.price.term": _key(Text(example="on-demand", choices=("on-demand", "spot", "1yr", "3yr", "owned")),
                             "on-demand (default), spot, 1yr, 3yr, owned."),
    "fleet.price.cloud": _key(Text(example="aws"), "Who sells."),
    "fleet.price.region": _key(Text(example="us"), "Region, or part of the world."),
    "fleet.price.as_of": _key(DAY, 'The day prices are looked at, in quotes: "2026-01-31".'),
    "workload.users": _key(TOKENS, "Users at once, each holding a full context."),
    "workload.context": _key(TOKENS, "Tokens a user holds: prompt and output."),
    "workload.isl": _key(TOKENS, "Prompt tokens of a request."),
    "workload.osl": _key(TOKENS, "Output tokens of a request."),
    "workload.n": _key(WHOLE, "Samples a user, sharing the prompt's blocks."),
    "workload.prefix_shared": _key(Either(kinds=(FROM_ZERO, TOKENS)), "Prompt tokens all users share."),
    "workload.concurrency": _key(TOKENS, "Users that each have one request under way."),
    "workload.request_per_s": _key(Number(above=True), "Requests per second, all replicas together.",
                                   "request-rate"),
    "workload.requests": _key(TOKENS, "Requests that come all at once."),
    "workload.batch": _key(TOKENS, "One batch from start to end."),
    "workload.arrivals": _key(Text(example="poisson", choices=("poisson",)), "How request_per_s arrive."),
    "workload.seed": _key(FROM_ZERO, "Seed of a simulation."),
    "slo.name": _key(Text(example="chat", choices=("chat", "reading")), "Named limits.", "slo"),
    "slo.ttft": _key(TIME, "Longest time to first token."),
    "slo.tpot": _key(TIME, "Longest time per output token."),
    "slo.ttft_p99": _key(TIME, "The same for 99 of 100 requests."),
    "slo.tpot_p99": _key(TIME, "The same for 99 of 100 requests."),
    "slo.e2e_p99": _key(TIME, "Longest whole answer of 99 of 100 requests."),
    "client.streaming": _key(Flag(), "Whether tokens are sent as they come."),
    "client.max_tokens": _key(TOKENS, "Output tokens the client asks for at most."),
    "client.timeout": _key(TIME, "How long the client waits."),
    "client.network": _key(TIME, "Client to server and back.", "network-ms"),
    "cost.output_token_per_s": _key(Number(above=True), "Measured speed of the whole fleet."),
    "cost.hours": _key(Number(above=True, high=744), "Hours of a month (730)."),
    "cost.schedule": _key(Text(example="weekdays 8-20"), "When the fleet runs."),
    "cost.diurnal": _key(Text(example="0.2,0.2,…"), "24 shares of the peak load, hour by hour."),
    "cost.utilization": _key(Number(above=True, high=1), "Part of the time with work (1)."),
    "cost.spot_reserve": _key(Number(high=10), "Spare spot capacity, as a fraction (0.1)."),
    "cost.own": _key(Many(of=Text(example="pue=1.2")), "Ownership: [pue=1.2, depreciation_years=4]."),
    "cost.watts": _key(Number(above=True, high=1e5), "Measured watts of a GPU, with its host."),
    "cost.grid_gco2_per_kwh": _key(Number(high=3000), "Grams of CO2e per kWh."),
    "cost.api_price_input": _key(Number(above=True), "An API's USD per million prompt tokens."),
    "cost.api_price_output": _key(Number(above=True), "An API's USD per million output tokens."),
    "cost.users": _key(WHOLE, "Users of the fleet, at work or not."),
    "cost.requests_per_user_day": _key(Number(above=True), "Requests a user makes a day."),
}  # fmt: skip

SECTIONS: Final = {
    "engine": "The serving engine and its flags.",
    "fleet": "GPUs and how the model is spread over them.",
    "fleet.price": "What a GPU costs.",
    "workload": "Users, lengths and load.",
    "slo": "What users must see.",
    "client": "The program that asks.",
    "cost": "Hours, utilisation, ownership and what to compare with.",
}

# Numbers whose unit stands in the key (timeout_ms: 500) instead of the value (timeout: 500ms).
AMOUNT: Final = Number(high=1e9)
_IN_KEY: Final[dict[int, dict[str, float]]] = {
    id(TIME): {"_s": 1.0, "_ms": TIME_UNITS["ms"]},
    id(SIZE): {"_gb": float(SIZE_UNITS["GB"]), "_gib": float(SIZE_UNITS["GiB"])},
}
_IN_SI: Final = {id(TIME): "_s", id(SIZE): "_bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """A key as it may be written, the key of the table it is, and its name in Scenario.values.

    `factor` turns the number into SI where the unit stands in the key.
    """

    key: str
    name: str
    kind: Kind
    factor: float | None = None


def _spellings() -> dict[str, Spelling]:
    made: dict[str, Spelling] = {}
    for key, entry in KEYS.items():
        name = key + _IN_SI.get(id(entry.kind), "")
        made[key] = Spelling(key=key, name=name, kind=entry.kind)
        for suffix, factor in _IN_KEY.get(id(entry.kind), {}).items():
            made[key + suffix] = Spelling(key=key, name=name, kind=AMOUNT, factor=factor)
    return made


SPELLINGS: Final = _spellings()
NAMES: Final = {spelling.name: place for place, spelling in enumerate(SPELLINGS.values())}
"""Names of Scenario.values in the order of the table."""


def children(section: str) -> dict[str, str]:
    """Name → dotted spelling or section, of everything that may stand in a section ("": the file itself)."""
    prefix = f"{section}." if section else ""
    made: dict[str, str] = {}
    for path in (*SPELLINGS, *SECTIONS):
        name = path.removeprefix(prefix)
        if path.startswith(prefix) and name and "." not in name:
            made[name] = path
    return made

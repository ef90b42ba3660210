"""Scenario → the questions of vram and latency, each about one replica.

Users and load are shared evenly by `fleet.replicas`. What a command cannot take into account makes its
answer unknown (NotEvaluatedError), never a figure of something else.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from capplan.expectation import NotEvaluatedError
from capplan.scenario import Scenario

if TYPE_CHECKING:
    from capplan.engines.plan import EngineFlags

# What changes speed and is not in the model of `latency`.
UNKNOWN_TO_LATENCY: Final = (
    "params",
    "lora",
    "lora_slots",
    "draft_model",
    "services",
    "engine.enforce_eager",
    "engine.gpu_layers",
    "fleet.gpu_memory_bytes",
    "workload.n",
)
NOT_USED_YET: Final = (
    "workload.seed",
    "slo.ttft_p99_s",
    "slo.tpot_p99_s",
    "slo.e2e_p99_s",
    "client.streaming",
    "client.max_tokens",
    "client.timeout_s",
)
"""Keys that no command answers about yet: a scenario may hold them, and reports name them."""
LOADS: Final = ("workload.concurrency", "workload.request_per_s", "workload.requests", "workload.batch")
_ALL_LAYERS: Final = 1 << 30


def brings_device(scenario: Scenario) -> bool:
    """Whether the device is that of the scenario's calibration: it has one, and names no GPU."""
    values = scenario.values
    return "fleet.gpu" not in values and values.get("calibration", "shipped") != "shipped"


def replicas(scenario: Scenario) -> int:
    """Servers that share the load."""
    return int(scenario.values.get("fleet.replicas", 1))


def vram_fields(scenario: Scenario, users: int | None) -> dict[str, Any]:
    """The question of `vram`; `users` a replica where the scenario says a rate instead of users."""
    values = scenario.values
    made = _given(
        values,
        ("model", "params", "kv_from", "precision", "kv_dtype", "block_size", "lora_slots", "draft_model"),
    )
    made |= _given(values, ("context", "isl", "osl", "n", "prefix_shared"), "workload.")
    made |= _given(values, ("tp", "pp", "pp_layers", "ep", "dp"), "fleet.")
    made |= _given(values, ("lora", "services"))
    if "fleet.gpu" in values:
        made["gpus"] = (values["fleet.gpu"],)
    if "fleet.gpu_memory_bytes" in values:
        made["gpu_memory_bytes"] = values["fleet.gpu_memory_bytes"]
    if users is not None:
        made["users"] = users
    made |= _given(values, ("overhead_bytes",))
    if "overhead_percent" in values:
        made["overhead_fraction"] = values["overhead_percent"] / 100
    flags = engine_flags(values)
    if flags is not None:
        made |= {"engine": values.get("engine.name", "vllm"), "engine_flags": flags}
    return made


def engine_flags(values: Mapping[str, Any]) -> "EngineFlags | None":
    """The engine's flags; None where the scenario has no engine."""
    given = {name.partition(".")[2]: value for name, value in values.items() if name.startswith("engine.")}
    if not given:
        return None
    from capplan.engines.plan import EngineFlags

    given.pop("name", None)
    if given.get("gpu_layers") == "all":
        given["gpu_layers"] = _ALL_LAYERS
    return EngineFlags(**given)


def fixed_users(scenario: Scenario) -> int | None:
    """Users of a replica where the scenario gives a number of them; None: a rate, or nothing."""
    for key in ("users", "concurrency", "requests", "batch"):
        found = scenario.values.get(f"workload.{key}")
        if found is not None:
            return -(-int(found) // replicas(scenario))
    return None


def latency_fields(scenario: Scenario) -> dict[str, Any]:
    """The question of `latency`; NotEvaluatedError where the scenario lacks a part, or says too much."""
    values = scenario.values
    for key in UNKNOWN_TO_LATENCY:
        if values.get(key) not in (None, False) and not (key == "workload.n" and values[key] == 1):
            raise NotEvaluatedError(f"latency does not know {key}")
    device = "calibration" if brings_device(scenario) else "fleet.gpu"
    missing = [key for key in ("model", device, "workload.isl", "workload.osl") if key not in values]
    if missing:
        raise NotEvaluatedError(f"latency needs {' and '.join(missing)}")
    made = _given(values, ("model", "precision", "kv_dtype"))
    made |= _given(values, ("isl", "osl", "prefix_shared"), "workload.")
    made |= _given(values, ("gpu", "tp", "pp", "ep", "dp"), "fleet.")
    made |= _given(values, ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization"), "engine.")
    if "engine.name" in values:
        made["engine"] = values["engine.name"]
    if "engine.version" in values:
        made["engine_version"] = values["engine.version"]
    if "client.network_s" in values:
        made["network_s"] = values["client.network_s"]
    made |= _load(scenario)
    given = [name for name in ("ttft", "tpot") if f"slo.{name}_s" in values]
    limits = ",".join(f"{name}={values[f'slo.{name}_s'] * 1e3:.6f}ms" for name in given)
    slo = values.get("slo.name", limits)
    return made | ({"slo": slo} if slo else {})


COST_ALONE: Final = (
    "output_token_per_s",
    "hours",
    "schedule",
    "diurnal",
    "utilization",
    "spot_reserve",
    "watts",
    "grid_gco2_per_kwh",
    "api_price_input",
    "api_price_output",
    "users",
    "requests_per_user_day",
)
COST_SPEED: Final = (
    "model",
    "precision",
    "kv_dtype",
    "isl",
    "osl",
    "engine",
    "engine_version",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "prefix_shared",
    "network_s",
    "profile",
    "concurrency",
    "request_per_s",
)
"""What of the question of `latency` prices tokens."""


def cost_fields(scenario: Scenario) -> tuple[dict[str, Any], str]:
    """The question of `cost`, about the whole fleet, and why it is about the bill alone ("": it is not).

    Tokens are priced where cost can ask latency the scenario's own question. NotEvaluatedError without a GPU.
    """
    values = scenario.values
    if "fleet.gpu" not in values and not brings_device(scenario):
        raise NotEvaluatedError("cost needs fleet.gpu")
    made = _given(values, ("gpu", "tp", "pp", "ep", "dp"), "fleet.")
    ranks = math.prod(values.get(f"fleet.{name}", 1) for name in ("tp", "pp", "dp"))
    made["gpus"] = ranks * replicas(scenario)
    made |= _given(values, ("term", "cloud", "region"), "fleet.price.")
    if "fleet.price.usd_per_gpu_hour" in values:
        made["price_usd_per_gpu_hour"] = values["fleet.price.usd_per_gpu_hour"]
    made |= _given(values, COST_ALONE, "cost.")
    if "output_token_per_s" in made:
        return made | _given(values, ("isl", "osl"), "workload."), ""
    try:
        speed = latency_fields(scenario)
    except NotEvaluatedError as error:
        return made, str(error)
    unknown = [name for name in ("requests", "batch") if name in speed]
    if unknown:
        return made, f"cost takes a steady load, and workload.{unknown[0]} is none"
    # The load of the whole fleet. Limits are for finding a load, and here it is given.
    load = {key.partition(".")[2]: values[key] for key in LOADS if key in values}
    made |= {name: speed[name] for name in COST_SPEED if name in speed and name not in load}
    return made | (load or {"concurrency": values["workload.users"]}), ""


def _load(scenario: Scenario) -> dict[str, Any]:
    """The load of one replica: the one given, else the users, each with one request at a time."""
    values, share = scenario.values, replicas(scenario)
    given = [key for key in LOADS if key in values]
    if not given:
        users = fixed_users(scenario)
        if users is None:
            raise NotEvaluatedError("latency needs a load: workload.concurrency or request_per_s")
        return {"concurrency": users}
    made: dict[str, Any] = {}
    for key in given:  # more than one is for `latency` to refuse
        value = values[key]
        made[key.partition(".")[2]] = value / share if key.endswith("_per_s") else -(-int(value) // share)
    return made


def unused(scenario: Scenario) -> list[str]:
    """Keys given that no command answers about yet."""
    return [key for key in NOT_USED_YET if key in scenario.values]


def _given(values: Mapping[str, Any], names: tuple[str, ...], prefix: str = "") -> dict[str, Any]:
    return {name: values[prefix + name] for name in names if prefix + name in values}

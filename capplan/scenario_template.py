"""The commented scenario file that `capplan init` writes."""

import json
import re
from typing import Any, Final

from capplan.scenario_keys import VERSION
from capplan.scenario_values import pitfall, spelled
from capplan.scenario_yaml import Mark, Scalar
from capplan.schema import FILE_NAME

_COMMENTS: Final = {
    "model": "A catalog name, or a path relative to this file: ./config.json, ./model.gguf.",
    "precision": "Format of the weights; auto: the checkpoint's own.",
    "engine": "Plans the engine's start-up; without it, the memory alone. Quote the version.",
    "fleet": "tp: GPUs that share each layer; replicas: servers that share the users.",
    "workload": "users hold a full context each; isl and osl: prompt and output tokens of a request.",
}


def template(values: dict[str, Any]) -> str:
    """A scenario file of these values, by dotted key; without a GPU nothing is expected to fit."""
    lines = [
        f"# yaml-language-server: $schema=./{FILE_NAME}",
        "# Checked by `capplan check`; every key is explained by the schema (`capplan schema`).",
        f"capplan: {VERSION}",
    ]
    for key in ("model", "precision", "kv_dtype"):
        if key in values:
            lines += [f"# {_COMMENTS[key]}"] if key in _COMMENTS else []
            lines.append(f"{key}: {_yaml(values[key])}")
    for section in ("engine", "fleet", "workload"):
        inner = [
            (key.partition(".")[2], value) for key, value in values.items() if key.startswith(f"{section}.")
        ]
        if inner:
            lines.append(f"# {_COMMENTS[section]}")
            lines.append(f"{section}: {{{', '.join(f'{name}: {_yaml(value)}' for name, value in inner)}}}")
    lines += ["# What must stay true; `capplan check` fails where it does not.", "expect:"]
    lines += _expected(values)
    return "\n".join(lines) + "\n"


def _expected(values: dict[str, Any]) -> list[str]:
    has_gpu = "fleet.gpu" in values or "fleet.gpu_memory" in values
    made = ["  vram.fits: true"] if has_gpu else ["  vram.total.gib: {at_most: 80}"]
    # Figures are of one replica.
    users = -(-values.get("workload.users", 16) // values.get("fleet.replicas", 1))
    made += [f"  vram.max_users: {{at_least: {users}}}"] if has_gpu else []
    lengths = {"workload.isl", "workload.osl"} <= values.keys()
    comment = "" if has_gpu and lengths else "needs a GPU, isl and osl: "
    return [
        *made,
        f"  # {comment}p90 is the pessimistic side of the estimate's band",
        "  # latency.ttft_ms: {at_most: 800, confidence: p90}",
        "  # latency.tpot_ms: {at_most: 50, confidence: p90}",
        "  # cost.usd_per_month: {at_most: 5000}",
    ]


def _yaml(value: Any) -> str:
    """A value that every YAML reader reads alike."""
    if not isinstance(value, str):
        return json.dumps(value)
    scalar = Scalar(text=value, plain=True, mark=Mark(file=""))
    plain = re.fullmatch(r"[A-Za-z0-9./_-]+", value, re.ASCII) is not None and not value.startswith("-")
    return value if plain and pitfall(scalar) is None and spelled(scalar) == "text" else json.dumps(value)

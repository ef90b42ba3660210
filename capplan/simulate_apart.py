"""Prompts on one replica, decoding on another like it: what of it is modelled, and the most that it serves.

    the most a second = min(1 / p, rate / (isl · KV bytes of a token), n / (K · d(n)))

p is a prompt's time in steps full of prompts, n the most requests that decode together, K their decode steps
of d(n) each. The slowest of replica, link and replica decides.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from capplan.errors import InputError
from capplan.formulas import serving
from capplan.formulas.steady import Engine, Scheduling, Traffic
from capplan.sim.disaggregated import Link
from capplan.sim.summary import STATISTICS, Apart

if TYPE_CHECKING:
    from capplan.simulate_setup import Subject


def link_of(subject: "Subject") -> Link | None:
    """The link, None where one replica does both; InputError for what is not modelled apart."""
    policy, question = subject.policy, subject.question
    if question.kv_link_bytes_per_s is None:
        return None
    layout = subject.setup.memory.whole_layout
    refusals = (
        (not policy.disaggregates, f"with the scheduler {policy.name}", "--engine, --scheduler"),
        (question.speculative_tokens is not None, "with drafts", "--speculative-tokens"),
        (
            layout is None or not subject.limits.kv_groups or bool(subject.limits.limited_groups),
            f"for {subject.setup.model.name}, whose layers keep a window or a state",
            "--model",
        ),
    )
    for refused, why, options in refusals:
        if refused:
            raise InputError(
                f"prompts apart are not modelled {why}",
                where=f"--kv-link-gbps, {options}",
                hint="leave --kv-link-gbps out",
            )
    assert layout is not None
    return Link(
        bytes_per_s=question.kv_link_bytes_per_s,
        latency_s=question.kv_link_s,
        kv_bytes_per_token=layout.bytes_per_token,
    )


def stable_request_per_s(
    link: Link, step_s: Any, traffic: Traffic, scheduling: Scheduling, pool_tokens: float
) -> dict[str, float]:
    """The most that each part serves, in requests per second; see the module."""
    engine = Engine(step_s, traffic, replace(scheduling, prefill_first=True))
    together = engine.room(0.0) / traffic.new_tokens
    found = {"prefill": 1 / engine.prompts(0.0, together)[0]}
    if engine.decode_steps:
        most, _ = serving.running_limit(traffic=traffic, scheduling=scheduling, kv_pool_tokens=pool_tokens)
        found["link"] = link.bytes_per_s / (traffic.isl * link.kv_bytes_per_token)
        found["decode"] = most / (engine.decode_steps * engine.decode_s(most))
    return found


def to_dict(link: Link, apart: Apart, stable: Mapping[str, float]) -> dict[str, Any]:
    """The JSON block `disaggregated`."""
    spread = apart.transfer_s
    return {
        "link_bytes_per_s": link.bytes_per_s,
        "link_latency_s": link.latency_s,
        "kv_bytes_per_token": link.kv_bytes_per_token,
        "transfer_s": None if spread is None else {name: getattr(spread, name) for name in STATISTICS},
        "transfer_share": apart.transfer_share,
        "link_busy": apart.link_busy,
        "prefill": {
            "busy": apart.prefill_busy,
            "kv_usage": apart.prefill_kv_usage.to_dict(),
            "preemptions": apart.prefill_preemptions,
        },
        "stable_request_per_s": dict(stable),
    }

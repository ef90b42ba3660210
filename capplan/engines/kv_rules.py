"""What changed when in vLLM's KV cache layout, and the rules of one version.

Read release by release from the sources named in vllm_kv, 0.8.5 to 0.32.0, on 2026-11-29.
"""

import re
from dataclasses import dataclass, replace
from typing import Final, Literal

from capplan.errors import InputError, shown

CacheMode = Literal["none", "align"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRules:
    """How one range of vLLM versions lays out its KV cache; each holds from `since` to the next.

    - `latents`: latent attention keeps its latent; before, keys and values of every head, padded to 256
      (vllm-project/vllm#10927).
    - `groups`: kinds of cache get groups of their own; before, windows count as if all tokens were kept.
    - `chunked_groups`: also in models with chunked layers, which else run without groups (a latency
      regression; VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE=1 turns them on).
    - `chunks_known`: the check for one request counts a chunk of chunked layers; before, all tokens.
    - `mixed_pages`: layers that all keep every token may have pages of different sizes.
    - `near_equal`: kinds whose numbers of layers differ by less than this factor are padded to the larger.
    - `stretch`, `pad`: smaller pages get more tokens a block, or padding; else such models do not start.
    - `all_batches`: windows hold the tokens of all batches in flight, not of one.
    - `mamba_cache_mode`: the default; "align" (prefix caching) holds two states a sequence. ("all", a state
      every block, existed from 0.15 to 0.31 and is not modelled.)
    - `checkpoints`: kinds of block that hold one state more in that mode.
    - `mla_alignment`: what the block of a hybrid with MLA is a multiple of.
    - `spare_block`: the block that is never given out counts in the check for one request.
    - `need`: what that check adds up: the layers' own pages without padding, the first group only (too
      little), or all groups.
    - `prints`: tokens as concurrency × max_model_len, or as blocks / groups × block size.
    - `whole_blocks`: concurrency counts whole blocks a request.
    """

    since: str
    latents: bool = False
    groups: bool = False
    chunked_groups: bool = False
    chunks_known: bool = False
    mixed_pages: bool = False
    near_equal: float = 1.0
    stretch: bool = False
    pad: bool = False
    all_batches: bool = False
    mamba_cache_mode: CacheMode = "none"
    checkpoints: frozenset[str] = frozenset()
    mla_alignment: int = 16
    spare_block: bool = False
    need: Literal["layers", "first group", "groups"] = "layers"
    prints: Literal["blocks", "concurrency"] = "blocks"
    whole_blocks: bool = False


def _history() -> tuple[KvRules, ...]:
    # 0.2 to 0.8.4 (the V0 engine) are taken from start-up logs, not from the source.
    made = [KvRules(since="0.2")]
    made.append(replace(made[-1], since="0.7.1", latents=True))
    made.append(replace(made[-1], since="0.9.1", groups=True, whole_blocks=True))
    made.append(replace(made[-1], since="0.10.0", chunks_known=True, chunked_groups=True))
    made.append(replace(made[-1], since="0.10.1", chunked_groups=False))
    made.append(replace(made[-1], since="0.11.0", mixed_pages=True))
    made.append(replace(made[-1], since="0.11.1", mla_alignment=64))
    made.append(replace(made[-1], since="0.12.0", near_equal=1.25, stretch=True))
    made.append(replace(made[-1], since="0.14.0", chunked_groups=True, need="first group"))
    made.append(replace(made[-1], since="0.18.0", near_equal=1.5))
    made.append(replace(made[-1], since="0.19.0", need="groups"))
    made.append(replace(made[-1], since="0.20.1", prints="concurrency"))
    made.append(replace(made[-1], since="0.24.0", pad=True))
    made.append(replace(made[-1], since="0.26.0", all_batches=True, mamba_cache_mode="align"))
    made.append(replace(made[-1], since="0.27.0", mla_alignment=128))
    made.append(replace(made[-1], since="0.29.0", spare_block=True, checkpoints=frozenset({"mamba2"})))
    return tuple(made)


RULES: Final = _history()
"""Rules by version, oldest first."""

NEWEST: Final = RULES[-1]
VERIFIED: Final = "0.11–0.32"
"""Versions whose own grouping and capacity functions gave the same numbers on random layer mixes.

0.32.0 also on 2,907 layouts of real models, block sizes included; 0.17 and newer also in pipeline stages.
0.9.1–0.10 differ in the tokens printed for models of states alone; older ones are as their sources state.
"""


def rules_for(version: str) -> KvRules:
    """The rules of a vLLM version such as "0.19.1" or "0.20.1rc1".

    A version newer than the rules gets the newest. Errors: InputError where it is no version or too old.
    """
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?", version.strip(), re.ASCII)
    if match is None:
        raise InputError(
            f"{shown(version)} is no vLLM version", where="--engine-version", hint="as in 0.19.1"
        )
    asked = _numbers(match.group(0).lstrip("v"))
    found = [rules for rules in RULES if _numbers(rules.since) <= asked]
    if not found:
        raise InputError(
            f"vLLM {shown(version)} is older than the rules known here",
            where="--engine-version",
            hint=f"{RULES[0].since} or newer",
        )
    return found[-1]


def _numbers(version: str) -> tuple[int, int, int]:
    major, minor, *patch = (int(part) for part in version.split("."))
    return major, minor, patch[0] if patch else 0

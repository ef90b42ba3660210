"""LoRA adapters: adapter_config.json, or "rank=16,targets=q_proj+v_proj".

Targets are module names as PEFT matches them: the end of a module's path, or one regular expression.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from capplan.errors import InputError, shown
from capplan.readers.config_keys import Keys
from capplan.readers.json_file import read_json

CONFIG_NAME: Final = "adapter_config.json"
ALL_LINEAR: Final = "all-linear"
MAX_RANK: Final = 4096
MAX_TARGETS: Final = 512
MAX_PATTERNS: Final = 64
MAX_PATTERN_CHARACTERS: Final = 2048
# Open quantifiers multiply the ways a path of 60 characters can be cut: five are a tenth of a second.
_MAX_QUANTIFIERS: Final = 5
_OPEN_QUANTIFIER: Final = re.compile(r"(?<!\\)(?:[*+]|\{\d*,\d*\})")
_QUANTIFIED_GROUP: Final = re.compile(r"\)(?:[*+]|\{)")
LITERAL: Final = re.compile(r"[\w.\-]+", re.ASCII)
# Modules of published checkpoints under other names than the layers they hold.
FUSED_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "W_pack", "qkv", "attn_qkv"),
        ("q_proj", "k_proj", "v_proj"),
    ),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "w13": ("gate_proj", "up_proj"),
}
RENAMED_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("dense", "out_proj", "wo"), ("o_proj",)),
    **dict.fromkeys(("fc1", "c_fc", "dense_h_to_4h", "w3"), ("up_proj",)),
    **dict.fromkeys(("fc2", "dense_4h_to_h", "w2"), ("down_proj",)),
    "w1": ("gate_proj",),
    "wq": ("q_proj",),
    "wk": ("k_proj",),
    "wv": ("v_proj",),
    "wte": ("embed_tokens",),
    "c_proj": ("o_proj", "down_proj"),
}
_IGNORED: Final = frozenset(
    (
        "alora_invocation_tokens", "alpha_pattern", "arrow_config", "auto_mapping",
        "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying", "eva_config",
        "fan_in_fan_out", "inference_mode", "init_lora_weights", "layer_replication",
        "layers_pattern", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout",
        "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size",
        "revision", "runtime_config", "task_type", "trainable_token_indices", "use_bdlora",
        "use_qalora", "use_rslora",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One adapter: its rank, the modules it targets, ranks of single modules, modules it replaces whole.

    `targets` are names; `pattern` is the regular expression where the file has one instead; both empty:
    every linear layer but the head. `layers` restricts it to those; () is all. `dora` adds a vector of
    out to every target.
    """

    rank: int
    targets: tuple[str, ...] = ()
    pattern: str = ""
    ranks: tuple[tuple[str, int], ...] = ()
    saved: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    layers: tuple[int, ...] = ()
    dora: bool = False
    source: str = ""

    @property
    def max_rank(self) -> int:
        """The largest rank of any module: what a server sizes its slots by."""
        return max((self.rank, *(rank for _, rank in self.ranks)))


def read_adapter(text: str) -> Adapter:
    """The adapter `text` means: a folder or file with an adapter_config.json, or "rank=16,targets=a+b".

    Errors: InputError for a file or a key that cannot be used, and for other PEFT methods.
    """
    if re.match(r"(rank|r|targets)=", text):
        return _from_words(text)
    if "\0" in text or len(text) > 4096:
        raise InputError(f"{shown(text)} is no path", where="--lora", hint="give a folder")
    path = _path(text)
    file = path / CONFIG_NAME if path.suffix != ".json" else path
    return _from_config(Keys(read_json(file), where=str(file)))


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:  # an unknown user after ~
        return Path(text)


def _from_words(text: str) -> Adapter:
    """rank=16,targets=q_proj+v_proj; without targets every linear layer."""
    words: dict[str, str] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        name = {"r": "rank"}.get(name.strip(), name.strip())
        if name not in ("rank", "targets") or not value or name in words:
            raise InputError(
                f"{shown(part)} is not understood",
                where="--lora",
                hint="write rank=16,targets=q_proj+v_proj, or the path of an adapter",
            )
        words[name] = value.strip()
    rank = words.get("rank", "")
    if not rank.isascii() or not rank.isdigit() or not 1 <= int(rank[:9]) <= MAX_RANK:
        raise InputError(
            f"{shown(rank)} is no rank", where="--lora", hint=f"a whole number from 1 to {MAX_RANK}"
        )
    named = words.get("targets", ALL_LINEAR)
    targets = () if named == ALL_LINEAR else tuple(named.split("+"))
    if len(targets) > MAX_TARGETS or not all(LITERAL.fullmatch(name) for name in targets):
        raise InputError(f"{shown(named)} is no list of modules", where="--lora", hint="write q_proj+v_proj")
    return Adapter(rank=int(rank), targets=targets, source="asked: --lora")


def _from_config(keys: Keys) -> Adapter:
    method = keys.text("peft_type", default="LORA")
    if method != "LORA":
        raise keys.fail("peft_type", f"{shown(method)} is not LORA", "only LoRA adapters are planned")
    if keys.items("target_parameters"):
        raise keys.fail("target_parameters", "is not understood", "only target_modules are")
    raw = keys.data.get("target_modules")
    pattern = raw if isinstance(raw, str) and raw != ALL_LINEAR else ""
    listed = keys.texts("target_modules") if isinstance(raw, list) else None
    keys.used.add("target_modules")
    if not pattern and raw != ALL_LINEAR and not listed:
        raise keys.fail("target_modules", "missing or empty", "a list of module names")
    if pattern:
        _check_pattern(keys, "target_modules", pattern)
    ranks = keys.child("rank_pattern")
    made = Adapter(
        rank=keys.integer("r", high=MAX_RANK),
        targets=_names(keys, "target_modules", listed or []),
        pattern=pattern,
        ranks=() if ranks is None else _ranks(ranks),
        saved=_names(keys, "modules_to_save", keys.texts("modules_to_save") or []),
        excluded=_excluded(keys),
        layers=_layers(keys),
        dora=keys.flag("use_dora", default=False),
        source=keys.where,
    )
    for key in keys.unused():
        if key not in _IGNORED and keys.data[key]:
            raise keys.fail(
                key,
                f"not understood (value {shown(keys.data[key], 40)}), and it could change memory",
                "give the adapter as rank=…,targets=… instead",
            )
    return made


def _names(keys: Keys, key: str, values: list[str]) -> tuple[str, ...]:
    if len(values) > MAX_TARGETS or any(len(value) > 512 for value in values):
        raise keys.fail(key, f"{len(values)} names are too many or too long", f"at most {MAX_TARGETS}")
    return tuple(values)


def _excluded(keys: Keys) -> tuple[str, ...]:
    raw = keys.data.get("exclude_modules")
    if isinstance(raw, str):
        keys.used.add("exclude_modules")
        _check_pattern(keys, "exclude_modules", raw)
        return (f"re:{raw}",)
    return _names(keys, "exclude_modules", keys.texts("exclude_modules") or [])


def _layers(keys: Keys) -> tuple[int, ...]:
    if isinstance(keys.data.get("layers_to_transform"), int):
        return (keys.integer("layers_to_transform", low=0),)
    return tuple(keys.integers("layers_to_transform") or ())


def _ranks(keys: Keys) -> tuple[tuple[str, int], ...]:
    made = []
    patterns = 0
    for name in keys.data:
        if not LITERAL.fullmatch(name):
            _check_pattern(keys, name, name)
            patterns += 1
        made.append((name, keys.integer(name, high=MAX_RANK)))
    if patterns > MAX_PATTERNS:
        raise keys.fail(name, f"{patterns} patterns are too many", f"at most {MAX_PATTERNS}")
    return tuple(made)


def _check_pattern(keys: Keys, key: str, pattern: str) -> None:
    """Refuse a regular expression that is broken, or that could take for ever on a module's path."""
    if (
        len(pattern) > MAX_PATTERN_CHARACTERS
        or _QUANTIFIED_GROUP.search(pattern)
        or len(_OPEN_QUANTIFIER.findall(pattern)) > _MAX_QUANTIFIERS
    ):
        raise keys.fail(shown(key, 40), "is too intricate a pattern", "name the modules, or use plain ones")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise keys.fail(shown(key, 40), f"broken pattern: {error}", "mend it") from None

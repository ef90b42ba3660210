"""What the layers of one decoder share while its config is read: keys, class conventions, widths."""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final, get_args

from capplan.errors import InputError
from capplan.readers.config_keys import MAX_WIDTH, Keys
from capplan.specs import Architecture, Role, Tensor

EXPERT_COUNTS: Final = (
    "num_experts",
    "n_routed_experts",
    "num_local_experts",
    "moe_num_experts",
    "num_routed_experts",
)
KV_HEADS: Final = (
    "num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", "n_kv_heads",
    "num_attention_groups", "kv_n_heads",
)  # fmt: skip
_STATE_BITS: Final = {"float32": 32, "bfloat16": 16, "float16": 16, "fp32": 32}
_FACTOR: Final = r"([A-Za-z_]\w*|\d+)([+-]\d+)?$"
_EXTRA_KEYS: Final = {"name", "role", "shape", "copies", "at", "when", "bits", "linear"}


class DecoderKeys:
    """The keys of one decoder, with its architecture to answer what they leave open."""

    def __init__(self, keys: Keys, architecture: Architecture, *, layers: int, dtype_bits: int) -> None:
        self.keys = keys
        self.layers = layers
        self.arch = architecture
        self.dtype_bits = dtype_bits
        self.hidden = keys.integer("hidden_size", "n_embd", "d_model", "model_dim", "dim")
        self.heads = keys.optional_integer("num_attention_heads", "n_head", "num_heads", "n_heads")

    def switch(self, rule: bool | str) -> bool:
        """A fixed answer, or the value of the key that decides."""
        if isinstance(rule, bool):
            return rule
        name, _, default = rule.partition(":")
        return self.keys.flag(name, default=default == "true")

    def require_heads(self) -> int:
        """Query heads; an error names the key when a layer needs them and they are missing."""
        if self.heads is None:
            return self.keys.integer("num_attention_heads")
        return self.heads

    def head_width(self, heads: int) -> int:
        """Width of a head: the key, else hidden / heads where that is whole."""
        width = self.keys.optional_integer(
            "head_dim", "attention_head_dim", "kv_channels", "head_size", "d_kv"
        )
        if width is not None:
            return width
        if self.hidden % heads:
            raise self.keys.fail(
                "head_dim",
                f"missing, and hidden_size {self.hidden} is not a multiple of {heads} heads",
                "add head_dim to the file",
            )
        return self.hidden // heads

    def kv_heads(self, heads: int) -> int:
        """Key/value heads: the key, one under multi-query, else all heads."""
        keys = self.keys
        count = keys.optional_integer(*KV_HEADS)
        multi_query = keys.flag("multi_query", "multi_query_attention", default=False)
        new_decoder = keys.flag("new_decoder_architecture", default=False)
        if multi_query and not new_decoder and "multi_query_group_num" not in keys.data:
            return 1
        if count is None:
            return heads
        if count > heads or heads % count:
            raise keys.fail(
                "num_key_value_heads",
                f"{count} do not divide {heads} query heads",
                "check both values in the file",
            )
        return count

    def state_bits(self) -> int:
        """Bits of an element of the recurrent state: the config's own dtype, else the model's."""
        name = self.keys.text("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
        if name is None or name == "auto":
            return self.dtype_bits
        if name not in _STATE_BITS:
            raise self.keys.fail("mamba_ssm_dtype", f"unknown {name!r}", "float32 or bfloat16")
        return _STATE_BITS[name]

    def norm(self, name: str, width: int | None = None) -> tuple[Tensor, ...]:
        """A norm as this family has it: weight, weight and bias, or nothing."""
        copies = {"rms": 1, "layer-no-bias": 1, "layer": 2, "none": 0}[self.arch.norm]
        if not copies:
            return ()
        shape = (width or self.hidden,)
        return (Tensor(name=name, role="norm", shape=shape, copies=copies, active_copies=copies),)

    def extra(self, kinds: Collection[str]) -> tuple[Tensor, ...]:
        """The small tensors the architecture lists for a place of these kinds."""
        return tuple(
            self._extra_tensor(entry)
            for entry in self.arch.extra
            if entry.get("at", "layer") in kinds and self.switch(self._when(entry))
        )

    def _when(self, entry: Mapping[str, Any]) -> bool | str:
        rule = entry.get("when", True)
        return rule if isinstance(rule, bool) else str(rule)

    def _extra_tensor(self, entry: Mapping[str, Any]) -> Tensor:
        role: Any = entry.get("role")
        shape = entry.get("shape")
        if set(entry) - _EXTRA_KEYS or role not in get_args(Role) or not isinstance(shape, list):
            raise InputError(
                f"bad entry of `extra`: {dict(entry)!r}",
                where=f"profiles/architectures/{self.arch.id}.yaml",
                hint=f"keys: {', '.join(sorted(_EXTRA_KEYS))}; a role of Tensor; a list as shape",
            )
        copies = self.size(entry.get("copies", 1))
        return Tensor(
            name=str(entry.get("name")),
            role=role,
            shape=tuple(self.size(part) for part in shape),
            linear=bool(entry.get("linear", False)),
            copies=copies,
            active_copies=copies,
            dtype_bits=entry.get("bits"),
        )

    def size(self, expression: object) -> int:
        """A product of numbers and widths ("2*hidden", "altup_num_inputs-1*hidden"), by name or by key."""
        product = 1
        for factor in str(expression).split("*"):
            match = re.match(_FACTOR, factor)
            if match is None:
                raise InputError(
                    f"bad size {factor!r} in `extra`",
                    where=f"profiles/architectures/{self.arch.id}.yaml",
                    hint="write numbers and names joined by *, each with +n or -n at most",
                )
            name, offset = match.groups()
            product *= (int(name) if name.isdigit() else self._named(name)) + int(offset or 0)
        if not 0 <= product <= MAX_WIDTH:
            raise self.keys.fail(str(expression), f"is {product}", "check the value in the file")
        return product

    def _named(self, name: str) -> int:
        if name == "hidden":
            return self.hidden
        if name == "heads":
            return self.require_heads()
        if name == "head_dim":
            return self.head_width(self.require_heads())
        if name == "kv_heads":
            return self.kv_heads(self.require_heads())
        if name == "experts":
            return self.keys.integer(*EXPERT_COUNTS)
        return self.keys.integer(name)

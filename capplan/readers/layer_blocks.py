"""From a config's keys to the blocks of one layer."""

from capplan.blocks import (
    Attention,
    CompressedAttention,
    Ffn,
    GatedDelta,
    Kda,
    Lightning,
    Mamba1,
    Mamba2,
    Mla,
    Moe,
    Rwkv,
    ShortConv,
)
from capplan.readers.config_keys import Keys
from capplan.readers.layer_plan import EXPERT_COUNTS
from capplan.specs import Architecture, Block, Layer, Tensor

_STATE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "fp32": 32}


class LayerBuilder:
    """Builds the blocks of one model's layers; `architecture` answers what the keys leave open."""

    def __init__(
        self, keys: Keys, architecture: Architecture, *, layers: int, dtype_bits: int
    ) -> None:
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

    def layer(self, index: int, mixer: str | None, ffn: str | None) -> Layer:
        """The layer at `index` with these kinds."""
        blocks: list[Block] = []
        if mixer is not None:
            blocks += self.mixer(index, mixer)
        if ffn == "moe":
            if self.arch.dense_beside_moe:
                blocks.append(self.dense(index))
            blocks.append(self.moe())
        elif ffn == "dense" and self.arch.mixer != "rwkv" and not self._no_ffn(index):
            blocks.append(self.dense(index))
        return Layer(blocks=tuple(blocks), norms=self._norms(blocks, ffn))

    def norm(self, name: str, width: int | None = None) -> tuple[Tensor, ...]:
        """A norm as this family has it: weight, weight and bias, or nothing."""
        copies = {"rms": 1, "layer-no-bias": 1, "layer": 2, "none": 0}[self.arch.norm]
        if not copies:
            return ()
        shape = (width or self.hidden,)
        return (Tensor(name=name, role="norm", shape=shape, copies=copies, active_copies=copies),)

    def _norms(self, blocks: list[Block], ffn: str | None) -> tuple[Tensor, ...]:
        names = self.arch.layer_norms
        if self.arch.single_blocks:
            names = names[:1]
        elif self.keys.present("block_configs") is not None:
            # A skipped block takes its norm with it.
            kinds = {block.kind for block in blocks}
            names = tuple(
                name
                for name, kind in zip(names, ("attention", "ffn"), strict=True)
                if kind in kinds
            )
        elif self.keys.flag("new_decoder_architecture", default=False) and self.keys.integer(
            "num_ln_in_parallel_attn", default=2
        ) == 2:
            names = ("ln_attn", "ln_mlp")
        elif not self.keys.flag("parallel_attn", "use_parallel_residual", default=True):
            names = ("input_layernorm", "post_attention_layernorm")
        if ffn == "moe":
            names = (*names, *self.arch.moe_norms)
        made = [tensor for name in names for tensor in self.norm(name)]
        if self.keys.present("attn_res_block_size") is not None:
            # Kimi-K3's residual attention between layers.
            for part in ("self_attention_res", "mlp_res"):
                made += self.norm(f"{part}_norm")
                made.append(Tensor(name=f"{part}_proj", role="other", shape=(1, self.hidden)))
        return (*made, *self._hyper_connections(), *self._per_layer_inputs())

    def _per_layer_inputs(self) -> tuple[Tensor, ...]:
        """Gemma 4: the projection of this layer's own input embedding."""
        self.keys.used.add("vocab_size_per_layer_input")
        width = self.keys.integer("hidden_size_per_layer_input", default=0, low=0)
        if not width:
            return ()
        return (
            Tensor(
                name="per_layer_input_gate", role="other", shape=(width, self.hidden), linear=True
            ),
            Tensor(
                name="per_layer_projection", role="other", shape=(self.hidden, width), linear=True
            ),
            *self.norm("post_per_layer_input_norm"),
        )

    def _hyper_connections(self) -> tuple[Tensor, ...]:
        """Manifold-constrained hyper-connections of DeepSeek-V4: mixing of `hc_mult` residual streams."""
        streams = self.keys.optional_integer("hc_mult", low=1, high=64)
        if streams is None:
            return ()
        rows = (2 + streams) * streams
        return tuple(
            Tensor(name=f"hc_{place}_{part}", role="other", shape=shape, dtype_bits=32)
            for place in ("attn", "ffn")
            for part, shape in (
                ("fn", (rows, streams * self.hidden)),
                ("base", (rows,)),
                ("scale", (3,)),
            )
        )

    def mixer(self, index: int, kind: str) -> list[Block]:
        """The attention or recurrent block (two side by side for "hybrid")."""
        keys = self.keys
        if kind == "hybrid":
            return [self.attention(index, "full"), self.mamba()]
        if kind == "mamba":
            return [self.mamba()]
        if kind == "conv":
            bias = keys.flag("conv_bias", default=False)
            kernel = keys.integer("conv_L_cache")
            return [ShortConv(hidden=self.hidden, kernel=kernel, bias=bias)]
        if kind == "rwkv":
            return [self.rwkv()]
        if kind == "linear":
            return [self.linear()]
        if keys.present("compress_ratios") is not None:
            return [self.compressed(index)]
        if keys.present("kv_lora_rank") is not None:
            return [self.mla(index)]
        block_configs = keys.items("block_configs")
        if block_configs is not None:
            return self._nas_attention(index, block_configs)
        return [self.attention(index, kind)]

    # --- attention -----------------------------------------------------------------------------

    def head_width(self, heads: int) -> int:
        """Width of a head: the key, else hidden / heads where that is whole."""
        width = self.keys.optional_integer(
            "head_dim", "attention_head_dim", "kv_channels", "head_size", "d_kv", "v_channels"
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
        count = keys.optional_integer(
            "num_key_value_heads", "n_head_kv", "num_kv_heads", "multi_query_group_num", "n_kv_heads"
        )
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

    def attention(self, index: int, kind: str) -> Attention:
        """Full, sliding, chunked or cross attention with this layer's widths."""
        keys = self.keys
        heads = self.require_heads()
        width, kv = self.head_width(heads), self.kv_heads(heads)
        v_width = keys.integer("v_head_dim", default=width)
        if kind == "sliding":
            heads = keys.integer("swa_num_attention_heads", default=heads)
            kv = keys.integer("swa_num_key_value_heads", default=kv)
            width = keys.integer("swa_head_dim", default=width)
            v_width = keys.integer("swa_v_head_dim", default=v_width)
        has_v = True
        if kind == "full" and "global_head_dim" in keys.data:
            width = v_width = keys.integer("global_head_dim", default=width)
            kv = keys.integer("num_global_key_value_heads", default=kv)
            has_v = not keys.flag("attention_k_eq_v", default=False)
        window = None
        if kind == "sliding":
            window = keys.integer("sliding_window", "sliding_window_size")
        elif kind == "chunked":
            window = keys.integer("attention_chunk_size")
        shared = self._shares_kv(index)
        norm_kind, norm_on = self._qk_norm()
        gate = self.arch.attention_gate
        if keys.flag("attn_output_gate", default=gate == "double"):
            gate = "double"
        return Attention(
            hidden=self.hidden,
            heads=heads,
            kv_heads=kv,
            k_width=width,
            v_width=v_width,
            keeps="shared" if shared else kind,  # type: ignore[arg-type]  # the plan's kinds
            window=window,
            qkv_bias=self.switch(self.arch.qkv_bias),
            o_bias=self.switch(self.arch.o_bias),
            qk_norm=norm_kind if norm_on else "none",
            qk_norm_bias=self.arch.qk_norm_bias,
            gate=gate == "double",
            sinks=self._has_sinks(kind),
            has_k=not shared,
            has_v=has_v and not shared,
            path=self.arch.attention_path,
            extra=self._attention_extra(index, heads, kv, gate, kind),
        )

    def _qk_norm(self) -> tuple[str, bool]:
        kind = self.arch.qk_norm
        named = self.keys.text("qk_norm_type")
        if named is not None:
            by_name = {"per_layer": "width", "per_head": "head"}
            if named not in by_name:
                raise self.keys.fail("qk_norm_type", f"unknown {named!r}", "per_layer or per_head")
            kind = by_name[named]
        return kind, self.switch(self.arch.qk_norm_switch)

    def _has_sinks(self, kind: str) -> bool:
        keys = self.keys
        per_kind = {"sliding": "add_swa_attention_sink_bias", "full": "add_full_attention_sink_bias"}
        keys.used.update(per_kind.values())
        if per_kind.get(kind) in keys.data or any(name in keys.data for name in per_kind.values()):
            return keys.flag(per_kind.get(kind, ""), default=False)
        return self.switch(self.arch.sinks)

    def _shares_kv(self, index: int) -> bool:
        """Whether the layer reads an earlier layer's cache (the last num_kv_shared_layers do)."""
        shared = self.keys.integer("num_kv_shared_layers", default=0, low=0)
        return shared > 0 and index >= self.layers - shared

    def _attention_extra(
        self, index: int, heads: int, kv_heads: int, gate: str, kind: str
    ) -> tuple[Tensor, ...]:
        path = self.arch.attention_path
        made: list[Tensor] = []
        if gate == "heads":
            made.append(
                Tensor(
                    name=f"{path}.g_proj",
                    role="attention",
                    shape=(heads, self.hidden),
                    linear=True,
                    split_axis=0,
                    split_units=heads,
                )
            )
        sparse = self.keys.child("sparse_attention_config")
        if sparse is not None and sparse.flag("use_sparse_attention", default=True):
            made += self._sparse_index(sparse, index, path)
        return tuple(made)

    def _sparse_index(self, sparse: Keys, index: int, path: str) -> list[Tensor]:
        """Block-sparse attention's index branch (MiniMax-M3): queries and one key, with norms."""
        layers = sparse.integers("sparse_attention_freq", low=0, high=1) or []
        if index < len(layers) and not layers[index]:
            return []
        heads, width = sparse.integer("sparse_num_index_heads"), sparse.integer("sparse_index_dim")
        shapes = (("index_q_proj", heads * width), ("index_k_proj", width))
        return [
            Tensor(
                name=f"{path}.{name}", role="attention", shape=(rows, self.hidden), linear=True
            )
            for name, rows in shapes
        ] + [
            Tensor(name=f"{path}.index_{letter}_norm", role="norm", shape=(width,)) for letter in "qk"
        ]

    def _nas_attention(self, index: int, configs: list[object]) -> list[Block]:
        entry = self._nas_entry(index, configs, "attention")
        if entry.flag("no_op", default=False):
            return []
        if entry.flag("replace_with_linear", default=False):
            raise entry.fail("replace_with_linear", "is not understood", "only attention or no_op")
        window = entry.optional_integer("window_length")
        sparsify = entry.present("sparsify", "num_sink_tokens")
        if sparsify is not None:
            raise entry.fail(sparsify, "is not understood", "only plain attention can be planned")
        heads = self.require_heads()
        group = entry.optional_integer("n_heads_in_group")
        if group is None:
            kv = entry.integer("num_key_value_heads", default=heads)
        else:
            kv = heads // group
        width = self.head_width(heads)
        return [
            Attention(
                hidden=self.hidden,
                heads=heads,
                kv_heads=kv,
                k_width=width,
                v_width=width,
                keeps="sliding" if window else "full",
                window=window,
                qkv_bias=self.switch(self.arch.qkv_bias),
                o_bias=self.switch(self.arch.o_bias),
            )
        ]

    def _nas_entry(self, index: int, configs: list[object], part: str) -> Keys:
        entry = configs[index] if index < len(configs) else None
        inner = entry.get(part) if isinstance(entry, dict) else None
        if not isinstance(inner, dict):
            raise self.keys.fail(
                "block_configs", f"layer {index} has no {part}", "give one entry for each layer"
            )
        return Keys(inner, where=self.keys.where, path=f"block_configs[{index}].{part}.")

    def _no_ffn(self, index: int) -> bool:
        configs = self.keys.items("block_configs")
        if configs is None:
            return False
        return self._nas_entry(index, configs, "ffn").flag("no_op", default=False)

    def mla(self, index: int) -> Mla:
        """Multi-head latent attention, with the sparse indexer where this layer has its own."""
        keys = self.keys
        # One latent serves all heads: the config's KV heads and head width are not read by the class.
        keys.used.update(("num_key_value_heads", "head_dim", "qk_head_dim"))
        types = keys.texts("indexer_types")
        index_heads = keys.integer("index_n_heads", default=0, low=0)
        own = index_heads > 0
        if types is not None and index < len(types):
            own = own and types[index] == "full"
        return Mla(
            hidden=self.hidden,
            heads=self.require_heads(),
            q_rank=keys.optional_integer("q_lora_rank"),
            kv_rank=keys.integer("kv_lora_rank"),
            nope_width=keys.integer("qk_nope_head_dim"),
            rope_width=keys.integer("qk_rope_head_dim", low=0),
            v_width=keys.integer("v_head_dim"),
            bias=keys.flag("attention_bias", default=False),
            index_heads=index_heads,
            index_width=keys.integer("index_head_dim", default=128),
            indexer=own,
            gate=keys.flag("mla_use_output_gate", default=False),
        )

    def compressed(self, index: int) -> CompressedAttention:
        """DeepSeek-V4's windowed and compressed attention."""
        keys = self.keys
        keys.used.update(("num_key_value_heads", "qk_rope_head_dim"))
        ratios = keys.integers("compress_ratios") or []
        if len(ratios) < self.layers:
            raise keys.fail(
                "compress_ratios",
                f"has {len(ratios)} entries",
                f"give one for each of {self.layers} layers",
            )
        ratio = ratios[index]
        # Only the finely compressed layers select entries by an indexer.
        indexed = 0 < ratio <= 4
        return CompressedAttention(
            hidden=self.hidden,
            heads=self.require_heads(),
            width=keys.integer("head_dim"),
            q_rank=keys.integer("q_lora_rank"),
            o_groups=keys.integer("o_groups"),
            o_rank=keys.integer("o_lora_rank"),
            window=keys.integer("sliding_window"),
            ratio=ratio,
            index_heads=keys.integer("index_n_heads") if indexed else 0,
            index_width=keys.integer("index_head_dim") if indexed else 0,
        )

    # --- recurrent -----------------------------------------------------------------------------

    def state_bits(self) -> int:
        """Bits of an element of the recurrent state: the config's own dtype, else the model's."""
        name = self.keys.text("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
        if name is None or name == "auto":
            return self.dtype_bits
        if name not in _STATE_BITS:
            raise self.keys.fail("mamba_ssm_dtype", f"unknown {name!r}", "float32 or bfloat16")
        return _STATE_BITS[name]

    def mamba(self) -> Block:
        """Mamba-2 where heads are given, else Mamba-1."""
        keys = self.keys
        heads = keys.optional_integer("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")
        if heads is None and self.arch.mixer == "mamba" and keys.present("num_heads") is not None:
            heads = keys.integer("num_heads")
        path = "mixer" if self.arch.single_blocks or self.arch.mixer == "mamba" else "mamba"
        if heads is None:
            return self._mamba1(path)
        state = keys.integer("ssm_state_size", "mamba_d_state", "state_size")
        width = keys.optional_integer("mamba_head_dim", "mamba_d_head", "mamba_headdim")
        if width is None and self.arch.mixer == "mamba":
            width = keys.optional_integer("head_dim")
        inner = keys.optional_integer("mamba_d_ssm", "mamba_intermediate_size")
        expand = keys.number("expand", "mamba_expand", default=None)
        if width is None:
            total = inner or int((expand or 2) * self.hidden)
            width = total // heads
        return Mamba2(
            hidden=self.hidden,
            heads=heads,
            head_width=width,
            state=state,
            n_groups=keys.integer("n_groups", "mamba_n_groups", "mamba_ngroups", default=1),
            kernel=keys.integer("conv_kernel", "mamba_d_conv", default=4),
            conv_bias=keys.flag("use_conv_bias", "mamba_conv_bias", default=True),
            proj_bias=keys.flag("mamba_proj_bias", "use_bias", "add_bias_linear", default=False),
            gated_norm=keys.flag("mamba_rms_norm", default=self.arch.id != "falcon_h1"),
            state_bits=self.state_bits(),
            conv_bits=self.dtype_bits,
            path=path,
        )

    def _mamba1(self, path: str) -> Mamba1:
        keys = self.keys
        expand = keys.number("mamba_expand", "expand", default=2) or 2
        inner = keys.optional_integer("mamba_intermediate_size")
        if inner is None and self.arch.mixer == "mamba":
            inner = keys.optional_integer("intermediate_size", "d_inner")
        rank = keys.present("mamba_dt_rank", "time_step_rank")
        auto = rank is None or keys.value(rank) == "auto"
        return Mamba1(
            hidden=self.hidden,
            inner=inner or int(expand * self.hidden),
            state=keys.integer("mamba_d_state", "state_size", "ssm_state_size", default=16),
            dt_rank=-(-self.hidden // 16)
            if auto
            else keys.integer("mamba_dt_rank", "time_step_rank"),
            kernel=keys.integer("mamba_d_conv", "conv_kernel", default=4),
            conv_bias=keys.flag("mamba_conv_bias", "use_conv_bias", default=True),
            proj_bias=keys.flag("mamba_proj_bias", "use_bias", default=False),
            inner_norms=self.arch.id == "jamba",
            state_bits=self.state_bits(),
            conv_bits=self.dtype_bits,
            path=path,
        )

    def linear(self) -> Block:
        """The linear-attention block whose widths the config gives."""
        keys = self.keys
        nested = keys.child("linear_attn_config")
        if nested is not None:
            return Kda(
                hidden=self.hidden,
                heads=nested.integer("num_heads"),
                head_width=nested.integer("head_dim"),
                kernel=nested.integer("short_conv_kernel_size", default=4),
                full_gate=nested.flag("use_full_rank_gate", default=False),
                conv_bits=self.dtype_bits,
            )
        if keys.present("linear_num_value_heads") is not None:
            return GatedDelta(
                hidden=self.hidden,
                k_heads=keys.integer("linear_num_key_heads"),
                v_heads=keys.integer("linear_num_value_heads"),
                k_width=keys.integer("linear_key_head_dim"),
                v_width=keys.integer("linear_value_head_dim"),
                kernel=keys.integer("linear_conv_kernel_dim"),
                fused_inputs=self.arch.id == "qwen3_next",
                state_bits=self.state_bits(),
                conv_bits=self.dtype_bits,
            )
        if self.arch.mixer == "attention" and not self.arch.lightning:
            raise keys.fail(
                "layer_types",
                "linear_attention layers without their widths",
                "linear_num_value_heads and its siblings, or linear_attn_config, are needed",
            )
        heads = self.require_heads()
        return Lightning(hidden=self.hidden, heads=heads, head_width=self.head_width(heads))

    def rwkv(self) -> Rwkv:
        """RWKV-5's time and channel mixing."""
        keys = self.keys
        inner = keys.integer("attention_hidden_size", default=self.hidden)
        return Rwkv(
            hidden=self.hidden,
            inner=inner,
            head_width=keys.integer("head_size", "head_dim", default=64),
            ffn=keys.integer("intermediate_size", default=int(self.hidden * 3.5) // 32 * 32),
        )

    # --- feed-forward --------------------------------------------------------------------------

    def dense(self, index: int) -> Ffn:
        """Dense feed-forward."""
        keys = self.keys
        configs = keys.items("block_configs")
        ffn = self._nas_width(index, configs) if configs is not None else self._dense_width(index)
        return Ffn(
            hidden=self.hidden,
            ffn=ffn,
            gated=self.arch.mlp_gated,
            bias=self.switch(self.arch.mlp_bias),
            path=self.arch.mlp_path,
        )

    def _dense_width(self, index: int) -> int:
        keys = self.keys
        # Where experts have the plain name, dense layers have one of their own.
        has_experts = keys.present(*EXPERT_COUNTS) is not None
        names: tuple[str, ...] = (
            "intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "inner_dim", "d_ff",
            "inner_hidden_size", "ffn_dim_expanded",
        )  # fmt: skip
        if has_experts:
            names = ("intermediate_size_mlp", "dense_intermediate_size", *names)
        width = keys.optional_integer(*names)
        double = keys.flag("use_double_wide_mlp", default=False) and self._shares_kv(index)
        if width is None:
            if self.arch.defaults.get("ffn_multiple") is None:
                return keys.integer("intermediate_size")
            width = keys.integer("ffn_multiple") * self.hidden
        return width * (2 if double else 1)

    def _nas_width(self, index: int, configs: list[object]) -> int:
        entry = self._nas_entry(index, configs, "ffn")
        if entry.flag("replace_with_linear", default=False):
            raise entry.fail("replace_with_linear", "is not understood", "it replaces the block")
        width = entry.optional_integer("intermediate_size")
        if width is not None:
            return width
        multiple = entry.number("ffn_mult")
        if multiple is None or not 0 < multiple < 1024:
            raise entry.fail("ffn_mult", "missing or absurd", "give ffn_mult or intermediate_size")
        # The publisher's rule: two thirds of the multiple, rounded up to 256.
        return -(-int(2 * multiple * self.hidden / 3) // 256) * 256

    def moe(self) -> Moe:
        """Routed experts with their router and shared experts."""
        keys = self.keys
        experts = keys.integer(*EXPERT_COUNTS)
        top = keys.integer(
            "num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk",
            "top_k_experts", "moe_k", "num_selected_experts", "moe_top_k", "moe_num_active_experts",
        )  # fmt: skip
        if top > experts:
            raise keys.fail(
                "num_experts_per_tok", f"{top} of {experts} experts", "check both values in the file"
            )
        width = keys.integer(
            "moe_intermediate_size", "expert_intermediate_size", "intermediate_size", "ffn_dim"
        )
        # Widths of dense layers, which a model of only routed layers may still state.
        keys.used.update(("intermediate_size_mlp", "dense_intermediate_size", "intermediate_size"))
        latent = keys.optional_integer("moe_latent_size", "routed_expert_hidden_size")
        path = self.arch.moe_path
        return Moe(
            hidden=self.hidden,
            experts=experts,
            experts_per_token=top,
            expert_ffn=width,
            gated=self.arch.mlp_gated,
            expert_bias=self.switch(self.arch.expert_bias),
            router_bias=self.switch(self.arch.router_bias),
            shared_ffn=self._shared_width(width),
            shared_gate=self.arch.shared_gate and self._shared_width(width) > 0,
            latent=latent,
            latent_norm=keys.flag("latent_moe_use_norm", default=False),
            path=path,
            extra=self._router_extra(experts, path),
        )

    def _shared_width(self, expert_width: int) -> int:
        """Summed width of the shared experts; 0: none."""
        keys = self.keys
        count = keys.optional_integer("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", low=0)
        given = keys.optional_integer(
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
            "share_expert_dim",
            low=0,
        )
        if given is not None:
            # Nemotron and Step give the width of all shared experts at once.
            return given if count is None or count > 0 else 0
        if count is not None:
            return count * expert_width
        return expert_width if self.arch.defaults.get("always_shared_expert") else 0

    def _router_extra(self, experts: int, path: str) -> tuple[Tensor, ...]:
        if not self.arch.dense_beside_moe:
            return ()
        return (
            Tensor(name=f"{path}.router.scale", role="router", shape=(self.hidden,)),
            Tensor(name=f"{path}.router.per_expert_scale", role="router", shape=(experts,)),
        )

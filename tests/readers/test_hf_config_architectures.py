"""Every file of profiles/architectures loads, and every trait in it means something."""

import pytest

from capplan import catalog
from capplan.readers.config_keys import Keys
from capplan.readers.decoder_keys import DecoderKeys

IDS = catalog.ids("architectures")
MIXERS = {"attention", "mamba", "hybrid", "rwkv", "rwkv4", "recurrent", "mixture"}
SWITCHES = (
    "gated_norm", "qkv_bias", "k_bias", "o_bias", "mlp_bias", "qk_norm_switch", "sinks", "parallel",
    "final_norm", "lm_head_bias", "router_bias", "expert_bias", "shared_bias",
)  # fmt: skip
PLACES = {
    "layer", "outside", "first", "rest", "full", "sliding", "cross", "linear", "mamba", "hybrid", "moe",
    "dense",
}  # fmt: skip


@pytest.mark.parametrize("identity", IDS)
def test_traits_are_valid(identity: str) -> None:
    arch = catalog.load_architecture(identity)
    assert arch.id == identity
    assert arch.source
    assert arch.read_on
    assert arch.mixer in MIXERS
    assert arch.norm in {"rms", "layer", "layer-no-bias", "none"}
    assert arch.qk_norm in {"none", "head", "width", "heads"}
    assert arch.attention_gate in {"none", "double", "full", "heads"}
    assert arch.encoder in {"none", "t5", "umt5", "bart", "whisper"}
    kind, _, number = arch.sliding.partition(":")
    assert kind in {"config", "never"} or (kind in {"pattern", "first", "prefix"} and int(number) > 1)
    for name in SWITCHES:
        rule = getattr(arch, name)
        assert isinstance(rule, bool) or rule.rpartition(":")[2] in ("true", "false"), name
    assert arch.ffn_divisor >= 1
    assert arch.modalities >= 1
    assert all(isinstance(key, str) and isinstance(value, str) for key, value in arch.rename.items())
    for rule in (*arch.required, *arch.stated):
        wanted, _, condition = rule.partition(" if ")
        assert all(name.isidentifier() for name in (*wanted.split("|"), *condition.split("|")) if name), rule


@pytest.mark.parametrize("identity", [name for name in IDS if catalog.load_architecture(name).extra])
def test_extra_tensors_have_a_place_and_a_shape(identity: str) -> None:
    arch = catalog.load_architecture(identity)
    widths = {
        "hidden_size": 64, "num_attention_heads": 8, "num_experts": 4, "intermediate_size": 96,
        "hc_mult": 4, "altup_num_inputs": 4, "laurel_rank": 8,
        "moe_router_enable_expert_bias": True,
    }  # fmt: skip
    decoder = DecoderKeys(Keys(widths, where="test", defaults=arch.defaults), arch, layers=2, dtype_bits=16)
    assert {str(entry.get("at", "layer")) for entry in arch.extra} <= PLACES
    made = decoder.extra(PLACES)
    assert len(made) == len(arch.extra)
    assert all(tensor.parameters > 0 for tensor in made)


def test_no_two_architectures_claim_a_name() -> None:
    catalog.build_index()

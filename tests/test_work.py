"""The shapes of a step, against figures worked by hand and against the weights of every catalog model."""

import pytest

from capplan import catalog, model_source
from capplan.specs import Format, Parallelism
from capplan.work import Experts, Gemm, Mix, StepWork, kernel_dtype, work_of


def work(name: str, *, precision: str | None = None, kv_bits: float = 16, **parallel: int) -> StepWork:
    stored = None if precision is None else catalog.weight_format(precision)
    return work_of(model_source.load(name), stored, kv_bits=kv_bits, parallel=Parallelism(**parallel))


def shapes(entries: tuple[Gemm, ...]) -> set[tuple[str, int, int, int]]:
    return {(entry.name, entry.n, entry.k, entry.count) for entry in entries}


def test_llama_8b_has_four_products_a_layer_and_a_head() -> None:
    made = work("8b")
    # q, k, v in one product: 4096 + 2 · 1024 rows; gate and up in one: 2 · 14336.
    assert shapes(made.gemms) == {
        ("attention.q_proj", 6144, 4096, 32),
        ("attention.o_proj", 4096, 4096, 32),
        ("mlp.gate_proj", 28672, 4096, 32),
        ("mlp.down_proj", 4096, 14336, 32),
        ("lm_head", 128256, 4096, 1),
    }
    assert made.collectives == ()


def test_tensor_parallel_ranks_cut_heads_columns_and_vocabulary() -> None:
    made = work("70b", tp=8)
    assert shapes(made.gemms) == {
        ("attention.q_proj", (64 + 2 * 8) * 128 // 8, 8192, 80),
        ("attention.o_proj", 8192, 1024, 80),
        ("mlp.gate_proj", 2 * 28672 // 8, 8192, 80),
        ("mlp.down_proj", 8192, 3584, 80),
        ("lm_head", 128256 // 8, 8192, 1),
    }
    reduces = [entry for entry in made.collectives if entry.op == "all_reduce"]
    # Two a layer, and one after the embedding that ranks share by rows.
    assert sum(entry.count for entry in reduces) == 161
    assert {entry.bytes_each for entry in reduces} == {16384}


def test_key_value_heads_stay_one_on_more_ranks_than_heads() -> None:
    mix = work("70b", tp=16).mixes[0].mixing
    assert (mix.heads, mix.kv_heads) == (4, 1)


def test_experts_are_cut_by_their_own_degrees() -> None:
    (experts,) = work("deepseek-ai/DeepSeek-V3", tp=8, ep=8).experts
    assert (experts.hidden, experts.inter, experts.experts, experts.top_k) == (7168, 2048, 256, 8)
    assert (experts.tp, experts.ep, experts.count, experts.gated) == (1, 8, 58, True)


def test_attention_replicas_gather_tokens_for_the_experts() -> None:
    made = work("deepseek-ai/DeepSeek-V3", dp=8, ep=8)
    ops = {entry.op: entry.count for entry in made.collectives if entry.name == "experts"}
    assert ops == {"all_gather": 58, "reduce_scatter": 58}
    assert not [entry for entry in made.collectives if entry.name == "block"]


def test_latent_attention_expands_with_two_products_of_16_bits() -> None:
    made = work("deepseek-ai/DeepSeek-V3", tp=8)
    # 128 heads · 128 / 8 ranks = 2048 rows for keys and as many for values, from a latent of 512.
    ups = {entry for entry in made.gemms if entry.name in ("attention.k_up", "attention.v_up")}
    assert {(entry.n, entry.k, entry.dtype) for entry in ups} == {(2048, 512, "bf16")}


def test_windows_and_full_layers_stay_apart() -> None:
    mixes = work("openai/gpt-oss-120b").mixes
    assert {(mix.mixing.window, mix.count) for mix in mixes} == {(128, 18), (None, 18)}


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("bf16", "bf16"),
        ("fp8", "fp8"),
        ("fp8_block", "fp8_block"),
        ("int8", "int8"),
        ("int4", "w4a16"),
        ("awq", "w4a16"),
        ("nvfp4", "nvfp4"),
        ("mxfp4", "w4a16_mxfp4"),
        ("q8_0", "w8a16"),
        ("q4_k_m", "w4a16"),
    ],
)
def test_kernel_of_a_format(precision: str, expected: str) -> None:
    assert kernel_dtype(catalog.weight_format(precision)) == expected


def test_unquantized_weights_take_16_bit_kernels() -> None:
    assert kernel_dtype(None) == "bf16"
    assert kernel_dtype(Format(id="w8-float", name="", element_bits=8, arithmetic="16-bit")) == "w8a16"


def test_scales_count_as_weight_bits() -> None:
    (gate,) = [g for g in work("8b", precision="int4").gemms if g.name == "mlp.gate_proj"]
    # Four bits, and a 16-bit scale with a 4-bit zero or none every 128.
    assert 4.125 <= gate.weight_bits <= 4.2


def test_gemm_load_by_hand() -> None:
    gemm = Gemm(name="x", n=14336, k=4096, dtype="bf16", weight_bits=16)
    assert gemm.load(1) == (117_440_512, 117_477_376)


def test_decode_load_reads_a_latent_once() -> None:
    (latent,) = work("deepseek-ai/DeepSeek-V3").mixes
    flop, moved = latent.decode_load(1, 1000)
    assert flop == 2 * 1000 * 128 * (576 + 512)
    assert moved == 1000 * 576 * 2 + 2 * 128 * (576 + 512)


def test_kept_entries_follow_window_stride_and_selection() -> None:
    window = next(m for m in work("openai/gpt-oss-120b").mixes if m.mixing.window)
    assert window.kept(4 * 1000, 4) == 4 * 128
    assert window.kept(4 * 100, 4) == 400
    sparse = next(m for m in work("deepseek-ai/DeepSeek-V3.2").mixes if m.mixing.selected)
    assert sparse.kept(100_000, 1) == 2048


def test_experts_touched_by_hand() -> None:
    entry = Experts(
        name="e", hidden=4, inter=8, experts=4, top_k=2, gated=True, dtype="bf16", weight_bits=16,
        activation_bits=16, tp=1, ep=1,
    )  # fmt: skip
    flop, moved = entry.load(1)
    # One token touches 2 of 4 experts, each 3 · 4 · 8 weights of 2 bytes.
    assert flop == 2 * 2 * 96
    assert moved == pytest.approx(2 * 96 * 2 + 2 * 2 * 4 * 2)
    assert entry.load(2)[1] == pytest.approx(3 * 96 * 2 + 4 * 2 * 4 * 2)


def linear_parameters(name: str) -> int:
    """Parameters that a step multiplies with: linear layers and routers, the head, not the embedding."""
    model = catalog.load_model(name)
    count = 0
    for group in model.groups:
        for block in group.layer.blocks:
            inner = getattr(block, "inner", block)
            own = inner if hasattr(inner, "tensors") else block
            for tensor in own.tensors():
                if len(tensor.shape) == 2 and (tensor.linear or tensor.role == "router"):
                    count += tensor.parameters * len(group.indices)
    head = next((t for t in model.outside if t.role == "lm_head" and t.linear), None)
    table = next((t for t in model.outside if t.role == "embedding"), None)
    source = head or table
    return count + (source.parameters if source is not None and len(source.shape) == 2 else 0)


@pytest.mark.parametrize("name", catalog.ids("models"))
def test_every_catalog_model_multiplies_with_all_its_linear_weights(name: str) -> None:
    made = work_of(catalog.load_model(name), None, kv_bits=16, parallel=Parallelism())
    weights = sum(gemm.n * gemm.k * gemm.count for gemm in made.gemms)
    for entry in made.experts:
        matrices = 3 if entry.gated else 2
        weights += entry.experts * matrices * entry.hidden * entry.inter * entry.count
    assert weights == linear_parameters(name)
    assert all(isinstance(mix, Mix) and mix.count > 0 for mix in made.mixes)

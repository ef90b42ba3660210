"""Field cases about llama.cpp's slots, windows, offload and compute buffers."""

import io

from capplan import model_source
from capplan.engines import llama_cpp, llama_cpp_buffers
from capplan.engines.log_reader import read_log
from capplan.engines.plan import EngineFlags, EnginePlan
from capplan.units import GIB
from capplan.weights import weight_budget
from tests.accuracy import shapes
from tests.accuracy.cases import FieldCase, field_case
from tests.accuracy.kv_cache import longest_context

LOG = """\
llama_model_loader: loaded meta data with 3 key-value pairs and 4 tensors from /m/x.gguf (version 3)
llama_kv_cache_init: KV self size  = 1005.79 MiB, c^KV (f16): 1005.79 MiB, kv^T: not used
alloc_buffer: allocating 279356.51 MiB on device 0: cudaMalloc failed: out of memory
llama_init_from_model: failed to allocate compute buffers
"""


@field_case(
    "bc-087",
    "ikawrakow/ik_llama.cpp#749",
    {"tokens_if_61_layers": (15008, 0.02), "compute_gib": (272.8, 0.001)},
)
def test_bc_087_a_modest_cache_and_a_compute_buffer(case: FieldCase) -> None:
    log = read_log(io.StringIO(LOG))
    cache, buffer = log.number("kv_total_bytes"), log.number("oom_tried_bytes")
    assert cache is not None
    assert buffer is not None
    case.check("tokens_if_61_layers", longest_context(shapes.layout(shapes.DEEPSEEK_V3), cache / GIB))
    case.check("compute_gib", buffer / GIB)
    assert log.refusal is not None
    assert log.refusal.reason == "compute_buffer_not_allocated"


def llama(**flags: object) -> EnginePlan:
    """An 8B model on an 80 GB card."""
    model = model_source.load("8b")
    return llama_cpp.plan(
        model,
        weights_bytes=weight_budget(model, None).bytes,
        total_bytes=80 * GIB,
        flags=EngineFlags(**flags),  # type: ignore[arg-type]
    )


@field_case("bc-088", "ggml-org/llama.cpp#17767", {"tokens_per_slot": 1024, "ctx_size_for_4096_each": 16384})
def test_bc_088_a_context_divided_over_slots(case: FieldCase) -> None:
    context = llama_cpp_buffers.cache_context(n_ctx=4096, sequences=4, unified=False)
    case.check("tokens_per_slot", context.tokens)
    plan = llama(max_model_len=4096, max_num_seqs=4)
    case.check("ctx_size_for_4096_each", plan.flag("ctx_size").value)
    assert plan.flag("kv_unified").value is False
    assert plan.max_concurrency == 4


@field_case(
    "bc-089",
    "ggml-org/llama.cpp#23652",
    {"shared_cache_tokens": 1024, "sum_of_advertised_slots": 4096, "oversubscription": 4},
)
def test_bc_089_four_slots_share_one_cache(case: FieldCase) -> None:
    plan = llama(max_model_len=1024)
    slots = int(plan.flag("parallel").value)
    context = llama_cpp_buffers.cache_context(n_ctx=1024, sequences=slots, unified=True)
    case.check("shared_cache_tokens", plan.kv_tokens)
    case.check("sum_of_advertised_slots", context.tokens * slots)
    case.check("oversubscription", context.tokens * slots / context.total_cells)
    assert any("4 full requests ask for 4 times what is there" in note for note in plan.notes)
    # A build from before the change, and slots asked for: each has its own part.
    assert llama(max_model_len=1024, version="b5000").flag("parallel").value == 1
    assert llama_cpp_buffers.cache_context(n_ctx=1024, sequences=4, unified=False).tokens == 256


@field_case("bc-098", "unslothai/unsloth#10489", {"kv_gib": (2.37, 0.005), "sum_gib": (11.58, 0.001)})
def test_bc_098_sliding_cells_are_the_window_and_a_micro_batch(case: FieldCase) -> None:
    plan = llama_cpp.plan(
        shapes.read(shapes.GEMMA_4_12B),
        weights_bytes=round(7.07 * GIB),
        total_bytes=16 * 10**9,
        flags=EngineFlags(max_model_len=262144, max_num_seqs=1, kv_bits=8),
    )
    case.check("kv_gib", plan.terms["kv_cache"] / GIB)
    # The loader's own weights and compute buffer; projector and draft head stand beside them.
    case.check("sum_gib", plan.terms["kv_cache"] / GIB + 7.07 + 2.14)


@field_case(
    "bc-100",
    "gpustack/gguf-parser-go#42",
    {"layers_offloadable_28_blocks": 29, "first_offloaded_index_n1": 28},
)
def test_bc_100_the_output_layer_is_the_first_on_the_gpu(case: FieldCase) -> None:
    places = {count: llama_cpp_buffers.place_layers(28, count) for count in range(31)}
    whole = min(count for count, place in places.items() if not place.host and place.output_on == 0)
    case.check("layers_offloadable_28_blocks", whole)
    one = places[1]
    assert (one.output_on, one.gpus) == (0, ((),))
    # Blocks 0 to 27 stay with the host: what moves is at index 28.
    case.check("first_offloaded_index_n1", len(one.host))
    assert places[2].gpus == ((27,),)

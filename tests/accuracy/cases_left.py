"""Field cases without a test yet, and the figures left of those that have one, with the reason each."""

ENGINE = "engine memory rules"
SCENARIO = "scenario files"
COMMAND_LINE = "the command line"
SPEED = "step times"
COST = "prices and cost"
DEVICE = "reading the device"
TRAFFIC = "simulated traffic"
RESULTS = "reading logs and measured results"

# id → (what is missing, why this case needs it)
LEFT: dict[str, tuple[str, str]] = {
    "bc-008": (ENGINE, "the pool shrinks with the tokens profiled per step; the model is not named"),
    "bc-015": (ENGINE, "graph capture in what the memory fraction leaves"),
    "bc-018": (ENGINE, "graphs inside the fraction from one version on"),
    "bc-020": (RESULTS, "a fixed part and a rate fitted from two logged capacities"),
    "bc-022": (RESULTS, "tokens per GiB as measured on one machine"),
    "bc-027": (ENGINE, "state blocks and attention blocks out of one pool"),
    "bc-030": (ENGINE, "one token count for the target's and the draft's pool"),
    "bc-033": (ENGINE, "multimodal items per prompt profiled at their worst"),
    "bc-034": (ENGINE, "multimodal items per prompt profiled at their worst"),
    "bc-041": (ENGINE, "MXFP4 experts padded on loading, and the profiling peak"),
    "bc-043": (ENGINE, "several processes on one GPU, each with its own context"),
    "bc-044": (DEVICE, "unified memory told by the device's attribute"),
    "bc-054": (ENGINE, "SGLang's static fraction"),
    "bc-059": (ENGINE, "activation by architecture and batched tokens"),
    "bc-088": (ENGINE, "llama.cpp divides its context over the slots"),
    "bc-089": (ENGINE, "llama.cpp's unified cache over four slots"),
    "bc-098": (ENGINE, "llama.cpp's sliding cells (window + micro-batch) and compute buffer"),
    "bc-100": (ENGINE, "llama.cpp's partial offload"),
    "bc-101": (ENGINE, "encoder-only models are refused (tested below), not planned"),
    "bc-122": (SPEED, "batch at which weight-only quantization stops helping"),
    "bc-124": (SPEED, "a step far above its bandwidth bound"),
    "bc-128": (TRAFFIC, "throughput and TTFT past the knee"),
    "bc-129": (TRAFFIC, "tail latency past the knee; a server's age"),
    "bc-133": (SPEED, "tensor parallelism of an overhead-bound step"),
    "bc-135": (SPEED, "replicas against tensor parallelism"),
    "bc-136": (DEVICE, "distinct prompts while profiling"),
    "bc-138": (DEVICE, "synthetic prompts without a shared prefix"),
    "bc-139": (SPEED, "prefix hits discount the prefill only"),
    "bc-145": (TRAFFIC, "cold start phases"),
    "bc-147": (TRAFFIC, "cold start phases"),
    "bc-148": (TRAFFIC, "scaling signals"),
    "bc-149": (TRAFFIC, "scaling signals"),
    "bc-151": (TRAFFIC, "scaling signals"),
    "bc-152": (COST, "money per million tokens"),
    "bc-153": (COST, "money per million tokens"),
    "bc-156": (COST, "billed hours against busy hours"),
    "bc-166": (COMMAND_LINE, "an unknown command answers with the nearest one, not yet with the version"),
    "bc-171": (COMMAND_LINE, "Windows paths are not run here"),
    "bc-175": (DEVICE, 'an exit code for "could not measure"'),
    "bc-177": (SCENARIO, "numbers converted by schema"),
    "bc-178": (SCENARIO, "numbers converted by schema"),
    "bc-180": (SCENARIO, "numbers with leading zeros refused"),
    "bc-182": (SCENARIO, "names that YAML reads as booleans"),
    "bc-184": (DEVICE, "unified memory without a memory query"),
    "bc-185": (DEVICE, "an error status beside zeros"),
    "bc-186": (DEVICE, "a carve-out reported as the memory"),
    "bc-188": (DEVICE, "page cache on unified memory"),
    "bc-189": (DEVICE, "MIG slices"),
    "bc-192": (DEVICE, "unavailable told from zero"),
    "bc-193": (DEVICE, "memory the driver reserves"),
    "bc-194": (DEVICE, "the all-ones value for unknown"),
    "bc-197": (DEVICE, "one device listed several times"),
    "bc-202": (SPEED, "active bytes with a measured efficiency"),
}

# id → figures of a covered case that are left: what is missing
PARTLY: dict[str, dict[str, str]] = {
    "bc-003": {
        "kv_gib_stage0_16_layers": ENGINE,
        "kv_gib_stage1_32_layers": ENGINE,
        "max_len_if_3.18_gib_is_on_stage0": ENGINE,
        "max_len_if_3.18_gib_is_on_stage1": ENGINE,
    },
    "bc-012": {
        "pool_gib_at_0.90": ENGINE,
        "headroom_gib_at_0.95": ENGINE,
        "headroom_gib_at_0.90": ENGINE,
    },
    "bc-013": {"pool_gib": ENGINE},
    "bc-023": {"state_and_padding_gib": ENGINE, "blocks_for_262144": ENGINE},
    # Towers are counted whole on every rank: 35.17 GiB against 34.43 seen.
    "bc-035": {"weights_gib_per_gpu": ENGINE},
    "bc-040": {"untouched_gib_per_gpu": ENGINE, "sampler_gib": ENGINE},
    "bc-042": {"budget_gib_each_at_0.2": ENGINE},
    "bc-046": {"nearest_usable_on_8_gpus": "replicas beside tensor parallelism"},
    # Proposals for bars, met by the tables of this folder.
    "bc-048": {"suggested_bar_weight_error": "a proposal", "suggested_bar_kv_error": "a proposal"},
    "bc-050": {"block_tokens": RESULTS},
    "bc-061": {"overstated_gib": "memory a process sees below what the driver reports"},
    "bc-064": {"kv_gib_engine_rule_2048_batched": ENGINE, "kv_gib_engine_rule_8192_batched": ENGINE},
    "bc-076": {"kv_bytes_per_token_materialised": "an engine without latent attention"},
    "bc-087": {"compute_gib": ENGINE},
    "bc-093": {"kv_gib_formula": "another tool's formula", "kv_gib_expanded": ENGINE},
    "bc-106": {"formula_gib": "another tool's formula"},
    "bc-161": {"suggested_bar_help_s": "timed in tests/benchmarks", "speedup": "another tool's"},
    "bc-162": {"suggested_bar_help_s": "timed in tests/benchmarks"},
    "bc-163": {"suggested_bar_help_s": "timed in tests/benchmarks"},
    "bc-165": {"suggested_bar_core_install_mb": "a proposal"},
    "bc-170": {"suggested_bar_offline_s": "a proposal"},
}

"""Field cases without a test yet, and the figures left of those that have one, with the reason each."""

ENGINE = "engine memory rules"
COMMAND_LINE = "the command line"
SPEED = "step times"
TRAFFIC = "simulated traffic"
RESULTS = "reading logs and measured results"

# id → (what is missing, why this case needs it)
LEFT: dict[str, tuple[str, str]] = {
    "bc-022": (RESULTS, "quotients of one machine's logs; its model is not named, and no known one fits"),
    "bc-101": (ENGINE, "encoder-only models have no entry: refused, not planned"),
    "bc-122": (SPEED, "batch at which weight-only quantization stops helping"),
    "bc-124": (SPEED, "a step far above its bandwidth bound"),
    "bc-128": (TRAFFIC, "throughput and TTFT past the knee"),
    "bc-129": (TRAFFIC, "tail latency past the knee; a server's age"),
    "bc-133": (SPEED, "tensor parallelism of an overhead-bound step"),
    "bc-135": (SPEED, "replicas against tensor parallelism"),
    "bc-136": (TRAFFIC, "prompts of a benchmark: identical ones hit the prefix cache"),
    "bc-138": (TRAFFIC, "prompts of a benchmark: synthetic ones share a prefix"),
    "bc-139": (SPEED, "prefix hits discount the prefill only"),
    "bc-145": (TRAFFIC, "cold start phases"),
    "bc-147": (TRAFFIC, "cold start phases"),
    "bc-148": (TRAFFIC, "scaling signals"),
    "bc-149": (TRAFFIC, "scaling signals"),
    "bc-151": (TRAFFIC, "scaling signals"),
    "bc-166": (COMMAND_LINE, "an unknown command answers with the nearest one, not yet with the version"),
    "bc-171": (COMMAND_LINE, "Windows paths are not run here"),
    "bc-202": (SPEED, "active bytes with a measured efficiency"),
}

# id → figures of a covered case that are left: what is missing
PARTLY: dict[str, dict[str, str]] = {
    # Tight by weights alone: what an image takes in the profiling run decides, and is not planned.
    "bc-035": {"fits_40gb_card": "activation of the encoder: the answer is open"},
    # vLLM's calibration has this figure: comparing it with itself would say nothing.
    "bc-043": {"overhead_above_budget_mib": "fitted on this case"},
    # Proposals for bars, met by the tables of this folder.
    "bc-048": {"suggested_bar_weight_error": "a proposal", "suggested_bar_kv_error": "a proposal"},
    "bc-050": {"block_tokens": RESULTS},
    "bc-161": {"suggested_bar_help_s": "timed in tests/benchmarks", "speedup": "another tool's"},
    "bc-162": {"suggested_bar_help_s": "timed in tests/benchmarks"},
    "bc-163": {"suggested_bar_help_s": "timed in tests/benchmarks"},
    "bc-165": {"suggested_bar_core_install_mb": "a proposal"},
    "bc-170": {"suggested_bar_offline_s": "a proposal"},
}

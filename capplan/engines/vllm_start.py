"""One vLLM start worked out: budget, terms, KV pool, and the same with other flags."""

import functools
import math
from dataclasses import replace

from capplan.engines import vllm_terms
from capplan.engines.kv_question import KvQuestion
from capplan.engines.kv_rules import NEWEST, KvRules, rules_for
from capplan.engines.plan import Band, EngineFlags
from capplan.engines.vllm_defaults import Number, beyond, calibration, facts, number, resolve, since
from capplan.engines.vllm_graphs import fraction_with_graphs, fraction_without_graphs
from capplan.engines.vllm_kv import KvPlan, KvPool, kv_pool, plan_pool
from capplan.engines.vllm_terms import Rank
from capplan.specs import Gpu, Model


class Planned:
    """One set of flags worked out: its terms and pool; `at` works out a change."""

    def __init__(
        self,
        model: Model,
        *,
        flags: EngineFlags,
        weights_bytes: int,
        extra_bytes: int,
        total_bytes: int,
        gpu: Gpu | None,
        visible_bytes: int | None,
        activation_bytes: int | None,
        non_torch_bytes: int | None,
    ) -> None:
        self.model, self.asked, self.gpu = model, flags, gpu
        self.weights, self.extra, self.total = weights_bytes, extra_bytes, total_bytes
        self.given = (visible_bytes, activation_bytes, non_torch_bytes)
        self.version: Number = number(flags.version or "")
        self.visible = vllm_terms.visible_bytes(total_bytes) if visible_bytes is None else visible_bytes
        self.flags = resolve(model, flags, version=self.version, visible_bytes=self.visible, gpu=gpu)
        self.budget = int(self.number("gpu_memory_utilization") * self.visible)
        self.graphs = 0 if flags.enforce_eager else vllm_terms.graph_bytes()
        self.inside = since("graphs_in_fraction_since", self.version)
        rank = self.rank()
        self.activation = self.peak(rank) if activation_bytes is None else activation_bytes
        self.non_torch = (
            vllm_terms.non_torch_bytes(rank, self.version) if non_torch_bytes is None else non_torch_bytes
        )
        used = weights_bytes + extra_bytes + self.activation + self.non_torch
        self.pool = self.budget - used - (self.graphs if self.inside else 0)

    def rank(self) -> Rank:
        """The rank planned: of one that holds first and last stage where no stage is named."""
        stage = self.asked.stage
        return Rank.of(
            self.gpu,
            tp=self.asked.tp,
            compiles=not self.asked.enforce_eager and since("kernels_timed_since", self.version),
            embeds=stage is None or stage.start == 0,
        )

    def peak(self, rank: Rank) -> int:
        """The profiling peak, as estimated."""
        return vllm_terms.activation_bytes(
            self.model,
            tokens=int(self.number("max_num_batched_tokens")),
            sequences=int(self.number("max_num_seqs")) if self.samples() else 0,
            rank=rank,
            version=self.version,
        )

    def first_start_bytes(self) -> int:
        """What of the peak is there at a first start only, when layers are compiled."""
        if self.given[1] is not None:
            return 0
        return self.activation - self.peak(replace(self.rank(), compiles=False))

    def samples(self) -> bool:
        """Whether the profiling run reaches the sampler on this rank: only the last stage has it."""
        stage = self.asked.stage
        return not self.chunked_old() and (stage is None or stage.stop == self.model.layers)

    def chunked_old(self) -> bool:
        """Whether this is chunked prefill before 0.8, whose profiling run ends before the sampler."""
        long = self.number("max_model_len") > facts()["v0_chunked_beyond_tokens"]
        return long and not since("v1_since", self.version)

    def number(self, name: str) -> float:
        """A numeric flag as resolved."""
        return float(self.flags[name].value)

    def at(self, **changes: object) -> "Planned":
        """The same with other flags."""
        visible, activation, non_torch = self.given
        return Planned(
            self.model,
            flags=replace(self.asked, **changes),  # type: ignore[arg-type]
            weights_bytes=self.weights,
            extra_bytes=self.extra,
            total_bytes=self.total,
            gpu=self.gpu,
            visible_bytes=visible,
            activation_bytes=activation,
            non_torch_bytes=non_torch,
        )

    def terms(self) -> dict[str, int]:
        """The budget and what comes out of it."""
        made = {"total": self.visible, "budget": self.budget, "weights": self.weights}
        if self.extra:
            made["extra"] = self.extra
        made |= {"activation": self.activation, "non_torch": self.non_torch}
        made["cuda_graphs" if self.inside else "cuda_graphs_outside"] = self.graphs
        return made

    def band(self, others: list["Planned"]) -> Band:
        """The pool with the calibration's errors; wider in doubt, and over other versions' rules."""
        fit = calibration()["pool_error"]
        factor = fit["doubted"] if beyond(self.version) else 1.0
        given = None not in self.given[1:]
        low, high = (0.0, 0.0) if given else (fit["low"] * factor, fit["high"] * factor)
        pools = [self.pool, *(other.pool for other in others)]
        return Band(
            value=self.pool,
            low=min(pools) + round(low * self.budget),
            high=max(pools) + round(high * self.budget),
        )

    def safe_fraction(self) -> float:
        """The largest fraction, in hundredths, that leaves room for what lies outside it.

        That is the process's own context, and CUDA graphs: before 0.21 all of them, later what capturing
        them takes beyond an estimate made with a tiny cache (vllm-project/vllm#57475: as much again).
        """
        outside = calibration()["process_bytes"] + self.graphs
        return max(0, math.floor(100 * (1 - outside / self.visible)) / 100) if self.visible else 0.0

    def same_pool(self) -> dict[str, float | None]:
        """The fractions that leave this pool with CUDA graphs outside them (before 0.21) and inside."""
        own = self.number("gpu_memory_utilization")
        if self.graphs >= self.visible:
            return {"graphs_outside": None, "graphs_inside": None}
        other = fraction_without_graphs if self.inside else fraction_with_graphs
        changed = other(own, graph_bytes=self.graphs, visible_bytes=self.visible)
        changed = None if changed is None else round(changed, 4)
        return {
            "graphs_outside": changed if self.inside else own,
            "graphs_inside": own if self.inside else changed,
        }

    def low_pool(self) -> int:
        """The pool at the lower end of its band."""
        return self.band([]).low

    @functools.cached_property
    def layout(self) -> KvPool:
        """The KV cache's groups."""
        return kv_pool(
            self.model,
            KvQuestion(
                kv_bits=self.asked.kv_bits,
                tp=self.asked.tp,
                pp=self.asked.pp,
                stage=self.asked.stage,
                block_size=int(self.number("block_size")),
                max_num_batched_tokens=int(self.number("max_num_batched_tokens")),
                rules=self.rules,
                draft=self.asked.draft,
            ),
        )

    def kv(self, pool: int) -> KvPlan:
        """The pool in blocks, and the check for one request."""
        return plan_pool(self.layout, kv_bytes=pool, max_model_len=int(self.number("max_model_len")))

    @property
    def rules(self) -> KvRules:
        """The KV layout's rules of this version."""
        return NEWEST if beyond(self.version) else rules_for(".".join(map(str, self.version)))

    def starts(self, pool: int) -> bool:
        """Whether vLLM starts with that pool."""
        loads = self.weights + self.extra <= self.visible
        return loads and self.free_at_start() and pool > 0 and self.kv(pool).starts

    def free_at_start(self) -> bool:
        """Whether the budget is free once the process has its own context: checked before loading."""
        if not since("free_memory_checked_since", self.version):
            return True
        return self.budget <= self.visible - int(calibration()["process_bytes"])

"""Operation times by a calibration of this very device: its measured tables, and what whole steps add.

    step = gemm · Σ (products + small kernels) + attention · Σ attention + layer · layers + step

The four numbers are fitted to whole steps (anchors), format by format: operations timed by themselves miss
what happens between them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from capplan.errors import InputError
from capplan.formulas import measured_cost, op_cost
from capplan.local_calibration import LOCAL, LocalCalibration
from capplan.op_costs import STAND_INS, Bounds, Calibration, OpCosts
from capplan.step import Host
from capplan.work import Collective, Elementwise, Experts, Gemm, Mix, StepWork

TIMED: Final = {"gemm": ("m",), "decode_attention": ("batch", "context"), "prefill_attention": ("tokens",)}
"""Operation → what a profile's `validity` says of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """What whole steps say of the sums: factors, and seconds a layer and a step."""

    gemm: float = 1.0
    attention: float = 1.0
    layer_s: float = 0.0
    step_s: float = 0.0


class LocalCosts(OpCosts):
    """Times of a profiled device; what it lacks is borrowed from `others` (none for a CPU)."""

    def __init__(
        self,
        local: LocalCalibration,
        engine: str,
        others: tuple[Calibration, ...] = (),
        *,
        anchor: Anchor | None = None,
    ) -> None:
        super().__init__(local.gpu, engine, others)
        self.local = local
        self.anchor = anchor or Anchor()
        self.main_dtype = "bf16"
        self.stood_in: dict[str, str] = {}

    @property
    def provenance(self) -> str:  # type: ignore[override]
        """ "calibrated", unless something was borrowed or another dtype stood in."""
        return "estimate" if self.borrowed() or self.stood_in else "calibrated"

    def ranges(self, operation: str, dtype: str) -> Mapping[str, Any]:
        """The sizes that the profile timed; of what it borrows, those of the lender's fit."""
        if self.order and dtype not in self.local.fit.get(operation, {}):
            return super().ranges(operation, dtype)
        timed = self.local.validity
        return {name: timed[name] for name in TIMED.get(operation, ()) if name in timed}

    def floor(self) -> Bounds | None:
        """None: what was measured on the device itself stands, its caches included."""
        return None

    def own(self, operation: str, dtype: str) -> Mapping[str, Any] | None:
        """The device's own numbers; another dtype's only where nothing can be borrowed."""
        by_dtype = self.local.fit.get(operation, {})
        tried = (dtype,) if self.order else STAND_INS.get(dtype, (dtype, "bf16"))
        for stand_in in tried:
            if stand_in in by_dtype:
                if stand_in != dtype:
                    self.stood_in[dtype] = stand_in
                found: Mapping[str, Any] = by_dtype[stand_in][LOCAL]
                return found
        if self.order:
            return None
        raise InputError(
            f"the profile has no {operation} in {dtype}",
            where=f"--profile {self.local.id}",
            hint="profile a model that has it, or --bounds",
        )

    def gemm(self, shape: Gemm, m: float) -> float:
        """One product of m rows."""
        found = self.own("gemm", self.rates.runs(shape.dtype))
        if found is None:
            return super().gemm(shape, m)
        return self.anchor.gemm * measured_cost.gemm_s(m=m, n=shape.n, k=shape.k, fit=found)

    def decode_array(self, mix: Mix, batch: float, kept: Any) -> Any:
        """One mixing of `batch` decoding sequences, for many `kept` at once (a numpy array)."""
        own = mix.mixing
        if own.form != "attention":
            return super().decode_array(mix, batch, kept)
        found = self.own("decode_attention", mix.kernel_dtype)
        if found is None:
            return super().decode_array(mix, batch, kept)
        asked = {"heads": own.heads, "kv_heads": own.kv_heads, "k_width": own.k_width, "v_width": own.v_width}
        if asked == dict(found["shape"]) and mix.queries == 1:
            time = measured_cost.decode_attention_s(batch=batch, kv_tokens=kept, table=found["table"])
        else:
            time = op_cost.decode_attention_s(
                batch=batch,
                kv_tokens=kept,
                **asked,
                kv_bits=mix.kv_bits,
                queries=mix.queries,
                flop_per_s=self.rates.flop_per_s("bf16"),
                bytes_per_s=self.rates.bytes_per_s,
                sms=self.rates.sms,
                fit=found["general"],
            )
        return self.anchor.attention * time

    def prefill(self, mix: Mix, sequences: float, tokens: float, pairs: float) -> float:
        """One mixing of prompt chunks."""
        own = mix.mixing
        found = None
        if own.form == "attention":
            found = self.own("prefill_attention", "bf16")
        if found is None:
            return super().prefill(mix, sequences, tokens, pairs)
        share = own.heads * (own.k_width + own.v_width) / found["width"]
        return measured_cost.prefill_attention_s(
            sequences=sequences, tokens=tokens, pairs=pairs, share=share, fit=found
        )

    def experts(self, shape: Experts, tokens: float) -> float:
        """The routed experts of one layer: none were profiled."""
        if not self.order:
            self.own("experts", self.rates.runs(shape.dtype))
        return super().experts(shape, tokens)

    def collective(self, shape: Collective, count: float) -> float:
        """One collective, by the profile's own of that rank count, else borrowed."""
        by_ranks = self.local.fit.get(shape.op, {}).get(LOCAL, {})
        own = by_ranks.get(shape.ranks) or by_ranks.get(str(shape.ranks))
        if own is None:
            if not self.order:
                self.own(shape.op, f"{shape.ranks} ranks")
            return super().collective(shape, count)
        return float(
            op_cost.collective_s(
                bytes_moved=shape.buffer_bytes(count),
                ranks=shape.ranks,
                link_bytes_per_s=own["link_bytes_per_s"],
                fit=own,
            )
        )

    def elementwise(self, shape: Elementwise, count: float) -> float:
        """One small kernel over `count` tokens or sequences."""
        found = self.own("elementwise", "bf16")
        if found is None:
            return super().elementwise(shape, count)
        moved = shape.bytes_each * count
        named = measured_cost.elementwise_s(name=shape.name, bytes_moved=moved, fit=found)
        if named is None:
            named = float(
                op_cost.elementwise_s(
                    bytes_moved=moved, bytes_per_s=self.rates.bytes_per_s, fit=found["general"]
                )
            )
        return self.anchor.gemm * named


def anchored(
    local: LocalCalibration, engine: str, others: tuple[Calibration, ...], work: StepWork
) -> LocalCosts:
    """Costs with the anchor of the format that most of the model's weights are in."""
    costs = LocalCosts(local, engine, others)
    weights: dict[str, float] = {}
    for gemm in work.gemms:
        if gemm.each == "token":
            dtype = costs.rates.runs(gemm.dtype)
            weights[dtype] = weights.get(dtype, 0.0) + gemm.n * gemm.k * gemm.count
    main = max(weights, key=lambda name: weights[name], default="bf16")
    costs.main_dtype = main
    found = local.fit.get("anchors", {}).get(main)
    if found is not None:
        costs.anchor = Anchor(
            gemm=found["gemm"],
            attention=found["attention"],
            layer_s=found["layer_us"] * 1e-6,
            step_s=found["step_us"] * 1e-6,
        )
    return costs


def host(costs: LocalCosts, engine: Host, layers: int) -> Host:
    """What lies around the operations: the anchors' part, and on a GPU the engine's own overhead.

    A profile of a CPU was timed with the host's work inside. Fusion is inside of what was measured.
    """
    added = costs.anchor.step_s + costs.anchor.layer_s * layers
    if costs.local.host_inside:
        return Host(step_s=added)
    return Host(step_s=engine.step_s + added, sequence_s=engine.sequence_s)

"""What a device's datasheet says of its rates, as operations need it: FLOP/s, bytes/s, links, processors."""

from typing import Final

from capplan.errors import InputError
from capplan.specs import Gpu
from capplan.units import GIGA

# Kernel dtype → the arithmetic it needs, and the weight-only dtype where the GPU has none.
NEEDS: Final = {
    "fp8": ("fp8", "w8a16"),
    "fp8_block": ("fp8", "w8a16"),
    "int8": ("int8", "w8a16"),
    "nvfp4": ("fp4", "w4a16"),
}
_PEAKS: Final = {
    "fp8": "fp8", "fp8_block": "fp8", "int8": "int8", "nvfp4": "fp4", "w4a8_mxfp4_mxfp8": "fp8",
}  # fmt: skip


class Rates:
    """A device's datasheet rates as operations need them; FLOP/s dense, links in one direction."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.bytes_per_s = gpu.memory_bandwidth_bytes_per_s
        peak = gpu.flop_per_s.get("bf16") or gpu.flop_per_s.get("fp16") or gpu.flop_per_s.get("fp32")
        if not peak:
            raise InputError(
                f"no peak rate is known for {gpu.name}", where=f"--gpu {gpu.id}", hint="name another GPU"
            )
        self.half_flop_per_s = peak

    def runs(self, dtype: str) -> str:
        """The kernel dtype this GPU really runs: weight-only where it cannot multiply the format."""
        if dtype == "w4a16_mxfp4" and self.gpu.flop_per_s.get("fp4"):
            return "w4a8_mxfp4_mxfp8"  # multiplied as it is, activations in 8 bits
        arithmetic, instead = NEEDS.get(dtype, (None, dtype))
        return dtype if arithmetic is None or self.gpu.flop_per_s.get(arithmetic) else instead

    def flop_per_s(self, dtype: str) -> float:
        """Dense peak of a kernel dtype."""
        own = self.gpu.flop_per_s.get(_PEAKS.get(dtype, ""))
        return own or self.half_flop_per_s

    @property
    def sms(self) -> int:
        """Multiprocessors. Raises InputError where they are not known (TPUs have none)."""
        if self.gpu.sm_count is None:
            raise InputError(
                f"the multiprocessors of {self.gpu.name} are not known",
                where=f"--gpu {self.gpu.id}",
                hint="--bounds answers without them",
            )
        return self.gpu.sm_count

    @property
    def link_bytes_per_s(self) -> float:
        """One direction of NVLink (or its like), else of PCIe. Raises InputError where neither is known."""
        if self.gpu.nvlink_bytes_per_s:
            return self.gpu.nvlink_bytes_per_s / 2
        # Generation 3 carries 0.985 GB/s a lane and direction; each later one doubles it.
        generation, lanes = self.gpu.pcie_gen, self.gpu.pcie_lanes
        if generation is None or lanes is None:
            raise InputError(
                f"the link between several {self.gpu.name} is not known",
                where=f"--gpu {self.gpu.id}",
                hint="ask for one of them: without --tp, --pp, --dp and --ep",
            )
        return 0.985 * 2.0 ** (generation - 3) * lanes * GIGA

"""The lesson's own arithmetic beside the exact one."""

from typing import Any

from capplan.capacity import Need, Target
from capplan.units import GB, GIB


def lesson_sum(need: Need, targets: tuple[Target, ...]) -> dict[str, Any] | None:
    """Weights and overhead in GB, KV in GiB, added as one unit, as the lesson does; None without a KV cache.

    The headroom is that of `targets` where there is one.
    """
    if need.kv_bytes is None:
        return None
    weights_gb = need.weights_bytes / GB
    kv_gib = (need.kv_bytes + need.tail_bytes) / GIB
    overhead_gb = need.overhead.high_bytes / GB
    total = weights_gb + kv_gib + overhead_gb
    memory_gb = targets[0].usable_bytes / GB if len(targets) == 1 else None
    return {
        "weights_gb": weights_gb,
        "kv_cache_gib": kv_gib,
        "overhead_gb": overhead_gb,
        "total_mixed": total,
        "headroom_mixed": None if memory_gb is None else memory_gb - total,
        "note": "GB and GiB added as the lesson does; the bytes are exact",
    }

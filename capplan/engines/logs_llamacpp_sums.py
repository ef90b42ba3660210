"""llama.cpp's memory over all devices, from what it prints of each."""

from dataclasses import replace

from capplan.engines.log_record import Line, Notes, Reading, again

_HOST_OF = {
    "weights_bytes": "host_weights_bytes",
    "kv_pool_bytes": "host_kv_bytes",
    "compute_bytes": "host_compute_bytes",
}
_SUMMED = (
    *_HOST_OF,
    "state_bytes",
    "draft_weights_bytes",
    "draft_kv_pool_bytes",
    "gpu_total_bytes",
    "gpu_free_bytes",
)


def on_device(line: Line, device: str) -> Line:
    """The line as printed of a device."""
    return replace(line, rank=device)


def is_host(device: str) -> bool:
    """Whether a buffer lies in host memory: "CPU", "CPU_Mapped", "CPU_REPACK", "CUDA_Host", "Host"."""
    return device.startswith("CPU") or device.endswith("Host") or device in ("BLAS", "AMX")


def finish(notes: Notes) -> None:
    """Sums over the GPUs and over host memory, and the token counts that follow."""
    for name in _SUMMED:
        gpus: list[Reading] = []
        host: list[Reading] = []
        for device, readings in notes.by_rank.items():
            if device is not None and name in readings:
                (host if is_host(device) else gpus).append(readings[name])
        _sum(notes, name, gpus)
        if name in _HOST_OF:
            _sum(notes, _HOST_OF[name], host)
    _first_name(notes)
    whole = notes.by_rank.get(None, {})
    if "kv_total_bytes" not in whole:
        parts = [whole[name] for name in ("kv_pool_bytes", "host_kv_bytes") if name in whole]
        _sum(notes, "kv_total_bytes", parts)
    context = whole.get("context_tokens")
    if context is not None and isinstance(context.value, int):
        notes.put(again(context), "kv_tokens", context.value, weak=True, derived="n_ctx cells")
        notes.put(again(context), "max_model_len", context.value, weak=True, derived="n_ctx; one slot")


def _first_name(notes: Notes) -> None:
    """The first GPU's name stands for all."""
    for device in sorted(device for device in notes.by_rank if device is not None):
        reading = notes.get("gpu_name", device)
        if reading is not None and not is_host(device):
            notes.put(replace(again(reading), rank=None), "gpu_name", reading.value, weak=True)
            return


def _sum(notes: Notes, name: str, parts: list[Reading]) -> None:
    """Note a sum for the engine as a whole, at the line of its last part; what it printed itself stays."""
    values = [part.value for part in parts if isinstance(part.value, int)]
    if not values:
        return
    last = max(parts, key=lambda part: part.line)
    lines = ", ".join(str(part.line) for part in parts[:16])
    notes.put(
        replace(again(last), rank=None),
        name,
        sum(values),
        # The projection's figure of free memory yields to what the devices list.
        weak=name != "gpu_free_bytes",
        derived=None if len(values) == 1 else f"sum over devices (lines {lines})",
    )

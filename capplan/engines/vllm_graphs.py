"""A vLLM memory fraction carried across the version that put CUDA graphs inside it (0.21).

    pool before = fraction · visible − used              (graphs beside the fraction)
    pool after  = fraction · visible − used − graphs

so the pool stays where the fraction grows by graphs / visible, which is what the start-up log advises.
Sources: vllm-project/vllm#30515; gpustack/runner#251 (0.8200, "equivalent to 0.8048", "0.8352 to keep").
"""

from capplan.errors import InputError


def graphs_fraction(*, graph_bytes: int, visible_bytes: int) -> float:
    """The part of the memory CUDA sees that the graphs take. Example: 0.36 of 23.7 GiB: 0.0152."""
    if graph_bytes < 0 or visible_bytes <= graph_bytes:
        raise InputError(
            f"{graph_bytes:,} B of CUDA graphs on a GPU of {visible_bytes:,} B",
            where="cuda_graphs",
            hint="both in bytes, as the log has them",
        )
    return graph_bytes / visible_bytes


def fraction_with_graphs(fraction: float, *, graph_bytes: int, visible_bytes: int) -> float | None:
    """The fraction with graphs inside that leaves the pool `fraction` left with them outside.

    None where that is more than the whole memory.
    Example: 0.82, graphs of 0.36 GiB on 23.68 GiB: 0.8352.
    """
    after = fraction + graphs_fraction(graph_bytes=graph_bytes, visible_bytes=visible_bytes)
    return after if after <= 1 else None


def fraction_without_graphs(fraction: float, *, graph_bytes: int, visible_bytes: int) -> float | None:
    """The other way: the fraction of a version with graphs outside; None where graphs take all of it."""
    before = fraction - graphs_fraction(graph_bytes=graph_bytes, visible_bytes=visible_bytes)
    return before if before > 0 else None


def visible_from_fractions(*, fraction: float, without_graphs: float, graph_bytes: int) -> int:
    """The memory CUDA sees, of the two fractions and the graphs a log prints; bytes.

        graphs / (fraction − fraction without)

    Example: 0.36 GiB between 0.8048 and 0.8200: 23.7 GiB.
    """
    if not 0 < without_graphs < fraction <= 1 or graph_bytes <= 0:
        raise InputError(
            f"fractions {fraction} and {without_graphs} without graphs",
            where="gpu_memory_utilization",
            hint="the second is the smaller one, both in 0 to 1",
        )
    return round(graph_bytes / (fraction - without_graphs))

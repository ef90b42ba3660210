"""`capplan vram`: what serving needs, whether it fits, how many users."""

import os
from typing import TYPE_CHECKING, Annotated

import typer

from capplan.cli.engine_options import engine_flags, layer_count, stage_layers
from capplan.cli.output import OutputFormat, console_width, render, write, write_json
from capplan.errors import ExitStatus, InputError
from capplan.units import GIB, parse_count, parse_size_bytes

if TYPE_CHECKING:
    from capplan.estimate import VramEstimate

_ENGINE = "Plan its start-up: vllm, sglang, tensorrt-llm, tgi, llama.cpp; all: side by side."
_FRACTION = "Its share: of all memory (vllm, tgi), of free (sglang), of free after loading (tensorrt-llm)."
_WITH = "Started after it on the same GPU: MODEL[:gpu_memory_utilization=0.3,max_model_len=4096]."
_MODEL = "Catalog name or size (8b), or a path: config.json, its folder, .safetensors, index, .gguf."


def vram(
    model: Annotated[str | None, typer.Option(help=_MODEL)] = None,
    params: Annotated[str | None, typer.Option(help="Parameter count (70b) instead of a model.")] = None,
    kv_from: Annotated[str | None, typer.Option(help="Model whose KV cache --params uses.")] = None,
    precision: Annotated[str, typer.Option(help="Weight format; auto: the checkpoint's.")] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="KV cache dtype; auto: the checkpoint's.")] = "auto",
    users: Annotated[int, typer.Option(help="Users at once, each with a full context.")] = 16,
    context: Annotated[int | None, typer.Option(help="Tokens a user holds (4096).")] = None,
    isl: Annotated[int | None, typer.Option(help="Prompt tokens of it; with --osl or --context.")] = None,
    osl: Annotated[int | None, typer.Option(help="Output tokens of it; --isl + --osl = --context.")] = None,
    n: Annotated[int, typer.Option("--n", help="Samples a user, sharing its prompt's blocks.")] = 1,
    gpu: Annotated[list[str] | None, typer.Option(help="GPU, repeatable; or all, or local.")] = None,
    gpu_memory: Annotated[str | None, typer.Option(help="Memory with unit: 24GB, 80GiB.")] = None,
    gpu_memory_gib: Annotated[float | None, typer.Option(help="Memory in GiB.")] = None,
    tp: Annotated[int, typer.Option(help="GPUs that share each layer (tensor parallel).")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages, each with its own layers.")] = 1,
    pp_layers: Annotated[str | None, typer.Option(help="Layers of each stage: 16,32.")] = None,
    stage_gpu: Annotated[list[str] | None, typer.Option(help="GPU of each stage, if unequal.")] = None,
    ep: Annotated[int, typer.Option(help="Ranks that divide the experts whole.")] = 1,
    dp: Annotated[int, typer.Option(help="Replicas that divide the users, and share experts.")] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.")] = 16,
    overhead: Annotated[
        str | None, typer.Option(help="Beside weights and KV: 1.5GB, or 10% of weights.")
    ] = None,
    prefix_shared: Annotated[int, typer.Option(help="Prompt tokens all users share.")] = 0,
    lora: Annotated[list[str] | None, typer.Option(help="Adapter: path, or rank=16,targets=q_proj.")] = None,
    lora_slots: Annotated[int | None, typer.Option(help="Adapters served at once.")] = None,
    draft_model: Annotated[str | None, typer.Option(help="Draft model: name, path, or mtp.")] = None,
    profile: Annotated[str | None, typer.Option(help="File of a profiled device: its memory.")] = None,
    calibration: Annotated[str | None, typer.Option(help="Overhead measured by doctor --save.")] = None,
    online: Annotated[bool, typer.Option("--online", help="Ask the Hugging Face Hub for it.")] = False,
    engine: Annotated[str | None, typer.Option(help=_ENGINE)] = None,
    engine_version: Annotated[
        str | None, typer.Option(help="Of the engine: 0.24, b9272, or unknown.")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest request the engine admits.")] = None,
    max_num_batched_tokens: Annotated[int | None, typer.Option(help="Tokens of a step at most.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences at once at most.")] = None,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help=_FRACTION)] = None,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager", help="No CUDA graphs: less memory.")
    ] = False,
    gpu_layers: Annotated[str | None, typer.Option(help="llama.cpp: layers on the GPU, or all.")] = None,
    with_: Annotated[list[str] | None, typer.Option("--with", help=_WITH)] = None,
    output: Annotated[OutputFormat, typer.Option("-o", "--output")] = OutputFormat.TABLE,
    explain: Annotated[bool, typer.Option("--explain", help="The formulas with numbers.")] = False,
) -> int:
    """Memory need, verdict per GPU, most users, longest context.

    Example: capplan vram --model 8b --precision int4 --users 64
    """
    from capplan import estimate

    answer = estimate.vram(
        model,
        params=_count(params),
        kv_from=kv_from,
        precision=precision,
        kv_dtype=kv_dtype,
        users=users,
        **({} if context is None else {"context": context}),
        isl=isl,
        osl=osl,
        n=n,
        gpus=tuple(gpu or ()),
        gpu_memory_bytes=_memory(gpu_memory, gpu_memory_gib),
        tp=tp,
        pp=pp,
        pp_layers=stage_layers(pp_layers),
        stage_gpus=tuple(stage_gpu or ()),
        ep=ep,
        dp=dp,
        services=tuple(with_ or ()),
        block_size=block_size,
        prefix_shared=prefix_shared,
        lora=tuple(lora or ()),
        lora_slots=lora_slots,
        draft_model=draft_model,
        online=online,
        calibration=calibration,
        profile=profile,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        engine=engine,
        engine_flags=engine_flags(
            engine,
            version=engine_version,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            enforce_eager=enforce_eager,
            gpu_layers=layer_count(gpu_layers),
            overhead=overhead,
        ),
        **_overhead(overhead),
    )
    _write(answer, output, explain)
    refused = answer.fits is False and not answer.asks_all
    return int(ExitStatus.DOES_NOT_FIT if refused else ExitStatus.OK)


def _write(answer: "VramEstimate", output: OutputFormat, explain: bool) -> None:
    steps: tuple[str, ...] = ()
    if explain:
        from capplan.explain import explain_vram

        steps = explain_vram(answer)
    if output is OutputFormat.JSON:
        write_json(answer.to_dict() | ({"explain": list(steps)} if explain else {}))
        return
    from capplan import report, vram_report

    if output is OutputFormat.CSV:
        write(report.to_csv(vram_report.vram_rows(answer)))
    elif output is OutputFormat.MD:
        write(vram_report.vram_markdown(answer) + "".join(f"- {step}\n" for step in steps))
    else:
        render([*vram_report.vram_view(answer, console_width()), *report.step_view(steps)])


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    value = parse_count(text)
    if value is None or value < 1:
        raise InputError(f"{text!r} is no parameter count", where="--params", hint="write 70b, 8.03b or 500m")
    return value


def _size(text: str, option: str) -> int:
    value = parse_size_bytes(text)
    if value is None or value < 0:
        raise InputError(
            f"{text!r} is no size with a unit",
            where=option,
            hint="write 24GB (10^9) or 24GiB (2^30); they differ by 7 %",
        )
    return value


def _memory(text: str | None, gib: float | None) -> int | None:
    if text is not None and gib is not None:
        raise InputError("memory given twice", where="--gpu-memory, --gpu-memory-gib", hint="give one")
    if gib is not None:
        if not 0 < gib <= 1 << 20:
            raise InputError(f"{gib} GiB", where="--gpu-memory-gib", hint="give a size such as 80")
        return round(gib * GIB)
    return None if text is None else _size(text, "--gpu-memory")


def _overhead(text: str | None) -> dict[str, float | int]:
    if text is None:
        return {}
    stripped = text.strip()
    if stripped.endswith("%"):
        number = parse_count(stripped[:-1]) if stripped[:-1].isdigit() else None
        try:
            percent = float(number if number is not None else stripped[:-1])
        except ValueError:
            percent = -1
        if not 0 <= percent <= 1000:
            raise InputError(f"{text!r} is no share of the weights", where="--overhead", hint="write 15%")
        return {"overhead_fraction": percent / 100}
    return {"overhead_bytes": _size(stripped, "--overhead")}

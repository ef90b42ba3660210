"""`capplan doctor` and `capplan compare`: an engine's log beside the plan of the same start."""

import sys
from typing import IO, TYPE_CHECKING, Annotated

import typer

from capplan.cli.output import OutputFormat, render, write, write_json
from capplan.errors import ExitStatus, InputError

if TYPE_CHECKING:
    from capplan.doctor import Diagnosis

_MODEL = "The model, where the log's name for it is not known: a catalog name or a path."
_GPU = "The GPU, where the log does not name it."


def doctor(
    file: Annotated[str, typer.Argument(help="Start-up log or out-of-memory trace; - for standard input.")],
    model: Annotated[str | None, typer.Option(help=_MODEL)] = None,
    gpu: Annotated[str | None, typer.Option(help=_GPU)] = None,
    save: Annotated[str | None, typer.Option(help="Write what was measured, for vram --calibration.")] = None,
    force: Annotated[bool, typer.Option("--force", help="--save may overwrite.")] = False,
    online: Annotated[bool, typer.Option("--online", help="Ask the Hugging Face Hub for --model.")] = False,
    output: Annotated[OutputFormat, typer.Option("-o", "--output")] = OutputFormat.TABLE,
) -> int:
    """What a start-up log says, beside the plan of the same start, and which flag to turn.

    Reads vLLM, SGLang, TensorRT-LLM, TGI and llama.cpp. Exit code 4: it did not start, and no single flag
    makes it start.

    Example: capplan doctor vllm.log --gpu h100
    """
    from capplan.doctor import diagnose

    found = diagnose(_source(file), model=model, gpu=gpu, online=online)
    if save is not None:
        _save(found, save, force)
    _write(found, output)
    return _status(found)


def compare(
    log: Annotated[str | None, typer.Option(help="Start-up log of an engine.")] = None,
    model: Annotated[str | None, typer.Option(help=_MODEL)] = None,
    gpu: Annotated[str | None, typer.Option(help=_GPU)] = None,
    online: Annotated[bool, typer.Option("--online", help="Ask the Hugging Face Hub for --model.")] = False,
    output: Annotated[OutputFormat, typer.Option("-o", "--output")] = OutputFormat.TABLE,
) -> int:
    """What was measured beside what is planned.

    Example: capplan compare --log vllm.log
    """
    from capplan.doctor import diagnose

    if log is None:
        raise InputError("nothing to compare with", where="capplan compare", hint="give --log FILE")
    _write(diagnose(_source(log), model=model, gpu=gpu, online=online), output)
    return int(ExitStatus.OK)


def _source(file: str) -> str | IO[bytes]:
    return sys.stdin.buffer if file == "-" else file


def _save(found: "Diagnosis", path: str, force: bool) -> None:
    from capplan import memory_calibration

    subject = found.subject
    known = subject.model.name if subject.model and subject.model.read_on else None
    calibration = memory_calibration.from_log(
        found.log, model=known, gpu_id=subject.gpu.id if subject.gpu else None
    )
    memory_calibration.save(calibration, path, force=force)
    print(f"saved: {calibration.label}, to use with vram --calibration {path}", file=sys.stderr)


def _write(found: "Diagnosis", output: OutputFormat) -> None:
    if output is OutputFormat.JSON:
        write_json(found.to_dict())
        return
    from capplan import doctor_view

    if output is OutputFormat.CSV:
        from capplan.report import to_csv

        write(to_csv(doctor_view.rows(found)))
    elif output is OutputFormat.MD:
        write(doctor_view.markdown(found))
    else:
        render(doctor_view.view(found))


def _status(found: "Diagnosis") -> int:
    return int(ExitStatus.DOES_NOT_FIT if found.startable is False else ExitStatus.OK)

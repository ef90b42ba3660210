"""`capplan init`: a commented scenario file."""

import os
import sys
from typing import Annotated, Any

import typer

from capplan.errors import InputError


def init(
    path: Annotated[str, typer.Argument(help="The file to write.")] = "scenarios/capplan.yaml",
    model: Annotated[str | None, typer.Option(help="Catalog name or size (8b), or a path from here.")] = None,
    gpu: Annotated[str | None, typer.Option(help="GPU of the catalog.")] = None,
    precision: Annotated[str | None, typer.Option(help="Weight format.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="KV cache dtype.")] = None,
    engine: Annotated[str | None, typer.Option(help="vllm, sglang, tensorrt-llm, tgi, llama.cpp.")] = None,
    engine_version: Annotated[str | None, typer.Option(help="Such as 0.24.")] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="GPUs that share each layer.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Servers that share the users.")] = None,
    users: Annotated[int | None, typer.Option(min=1, help="Users at once.")] = None,
    context: Annotated[int | None, typer.Option(min=1, help="Tokens a user holds.")] = None,
    isl: Annotated[int | None, typer.Option(min=1, help="Prompt tokens of a request.")] = None,
    osl: Annotated[int | None, typer.Option(min=1, help="Output tokens of a request.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> int:
    """Write a commented scenario file; on a terminal, asks for what is not given.

    Example: capplan init scenarios/chat.yaml --model 8b --gpu h100 --users 64
    """
    from capplan.baseline import write_file
    from capplan.check import Status, check_file
    from capplan.check_report import summary_of
    from capplan.scenario import Held
    from capplan.scenario_template import template
    from capplan.schema import FILE_NAME, schema_text

    if os.path.exists(path) and not force:
        raise InputError("there is a file already", where=path, hint="--force overwrites it")
    given = {
        "model": model,
        "precision": precision,
        "kv_dtype": kv_dtype,
        "engine.name": engine,
        "engine.version": engine_version,
        "fleet.gpu": gpu,
        "fleet.tp": tp,
        "fleet.replicas": replicas,
        "workload.users": users,
        "workload.context": context,
        "workload.isl": isl,
        "workload.osl": osl,
    }
    values = _asked({key: value for key, value in given.items() if value is not None})
    folder = os.path.dirname(path) or "."
    values["model"] = _from_file(values["model"], folder)
    text = template(values)
    reports = check_file(path, files=Held(text))
    for result in reports[0].results:
        if result.status is Status.UNUSABLE:
            raise InputError(result.got, where="capplan init", hint=result.hint)
    os.makedirs(folder, exist_ok=True)
    write_file(path, text)
    written = [path]
    schema = os.path.join(folder, FILE_NAME)
    if not os.path.exists(schema):
        write_file(schema, schema_text())
        written.append(schema)
    print(f"wrote {' and '.join(written)}", file=sys.stderr)
    print(summary_of(reports), file=sys.stderr)
    return 0


def _asked(values: dict[str, Any]) -> dict[str, Any]:
    """The values, and what is answered on a terminal; InputError without a model and nobody to ask."""
    if "model" in values:
        return values
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise InputError("no model", where="--model", hint="add --model 8b (there is no terminal to ask on)")
    values["model"] = typer.prompt("Model (name, size or path)", default="8b", err=True)
    if "fleet.gpu" not in values:
        values["fleet.gpu"] = typer.prompt("GPU", default="h100", err=True)
    if "workload.users" not in values:
        values["workload.users"] = typer.prompt("Users at once", default=16, type=int, err=True)
    if not {"workload.context", "workload.isl", "workload.osl"} & values.keys():
        values["workload.context"] = typer.prompt("Tokens a user holds", default=4096, type=int, err=True)
    return values


def _from_file(model: str, folder: str) -> str:
    """A model's path from here as a path from the scenario's folder; a name stays."""
    from capplan.model_source import model_path

    found = model_path(model)
    if found is None or found.is_absolute():
        return model
    relative = os.path.relpath(found, folder).replace(os.sep, "/")
    return relative if relative.startswith(".") else f"./{relative}"

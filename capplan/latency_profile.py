"""A question about speed on a device that was profiled: which device, its step costs, its errors."""

from dataclasses import replace
from pathlib import Path

from capplan import catalog, local_calibration, local_costs
from capplan.engine_speed import Band, Behaviour
from capplan.errors import InputError
from capplan.latency_question import LatencyQuestion
from capplan.local_calibration import LocalCalibration
from capplan.op_costs import shipped
from capplan.specs import Gpu
from capplan.work import StepWork


def device(question: LatencyQuestion) -> tuple[Gpu, LocalCalibration | None]:
    """The device asked about, and its profile where `profile` is a file measured on one.

    Errors: InputError without any device, for a broken file, and for a file of another device.
    """
    path = Path(question.profile)
    known = {name for entry in shipped() for name in (entry.id, entry.gpu_id)} | {"auto"}
    if question.profile in known or not path.is_file():
        if not question.gpu:
            if question.profile not in known:
                local_calibration.of_device(question.profile, None)  # says that there is no such file
            raise InputError(
                "on which GPU?",
                where="--gpu",
                hint="--gpu h100, or --profile FILE for the device of a profile",
            )
        return catalog.gpu(question.gpu), None
    data = catalog.read_yaml(path)
    if data.get("origin") != local_calibration.LOCAL:
        key = str((data.get("hardware") or {}).get("key", ""))
        return catalog.gpu(question.gpu or key), None
    local = local_calibration.checked(data, str(path))
    local_calibration.refuse_other(local, question.gpu)
    return local.gpu, local


def costs(local: LocalCalibration, engine: str, work: StepWork) -> local_costs.LocalCosts:
    """Step costs: the device's own; what a GPU's profile lacks is borrowed from shipped calibrations."""
    return local_costs.anchored(local, engine, () if local.kind == "cpu" else shipped(), work)


def behaviour(
    local: LocalCalibration, found: local_costs.LocalCosts, engine: Behaviour, layers: int
) -> Behaviour:
    """The engine around this device's steps, with the errors of its own steps held out.

    Where the host's work is inside of the profile nothing of a serving engine's is added: no HTTP, no
    launch-bound floor.
    """
    scheduling = engine.scheduling
    if local.host_inside:
        scheduling = replace(scheduling, first_token_s=0.0)
    return replace(
        engine,
        measured=True,
        verified="",
        covered=True,
        host=local_costs.host(found, engine.host, layers),
        scheduling=scheduling,
        bands=_bands(local, found.main_dtype) or engine.bands,
    )


def _bands(local: LocalCalibration, dtype: str) -> dict[str, Band]:
    """P10 to P90 of measured over predicted steps held out; prompts' own for TTFT, where there are some."""
    steps = local.error.get("step", {})
    step_error = steps.get(dtype) or next(iter(steps.values()), None)
    if step_error is None:
        return {}
    prompt = local.error.get("prompt", {}).get(dtype, step_error)
    decode = _band(step_error, step_error)
    inverse = Band(low=1 / decode.high, middle=1 / decode.middle, high=1 / decode.low, runs=decode.runs)
    return {
        "ttft": _band(step_error, prompt),
        "tpot": decode,
        "e2e": _band(step_error, prompt),
        "throughput": inverse,
    }


def _band(*errors: dict[str, float]) -> Band:
    """The widest of some errors, the prediction itself inside of it."""
    return Band(
        low=min(1.0, *(error["p10"] for error in errors)),
        middle=errors[-1]["p50"],
        high=max(1.0, *(error["p90"] for error in errors)),
        runs=int(errors[-1]["rows"]),
    )


def notes(local: LocalCalibration, found: local_costs.LocalCosts) -> list[str]:
    """What to know of a profiled answer."""
    made = [f"calibrated by {local.id}"]
    if local.host_inside:
        clock = local.data["run"]["clock"]
        made[0] += f" ({clock} clock): steps of capplan's own decode loop, nothing of an engine added"
    if "cache_bytes" in local.data.get("run", {}).get("assumed", ()):
        made.append("the profile assumed the size of the last-level cache: the system did not tell it")
    made += [f"{dtype} was not profiled: {stand_in} stands in" for dtype, stand_in in found.stood_in.items()]
    if found.main_dtype not in local.error.get("step", {}):
        made.append(f"no step in {found.main_dtype} was held out: the band is another format's")
    return made

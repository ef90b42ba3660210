"""One model's config.json and safetensors headers from the Hugging Face Hub, where the user says --online.

huggingface_hub is an optional extra and imported inside the function. It does the caching, honours
HF_HUB_OFFLINE and HF_TOKEN, and never fetches weights here: headers come by range requests.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from capplan.errors import ExtraMissingError, InputError, NetworkError, shown
from capplan.readers.checkpoint import Checkpoint
from capplan.readers.safetensors_header import DTYPE_BITS
from capplan.readers.stored_tensor import (
    MAX_ELEMENTS,
    MAX_FILES,
    MAX_TENSORS,
    StoredTensor,
    name_problem,
)

_T = TypeVar("_T")
_SITE: Final = "https://huggingface.co"


def fetch_config(repo: str) -> Path:
    """The path of the repository's config.json in the local cache, fetched where it is not there.

    Errors: ExtraMissingError without huggingface_hub, NetworkError when the Hub cannot be reached,
    InputError for a repository that is gated, private, unknown or has no config.json.
    """
    hub = _huggingface_hub()
    return Path(_asked(repo, lambda: hub.hf_hub_download(repo_id=repo, filename="config.json")))


def fetch_checkpoint(repo: str, quantization_config: Mapping[str, object] | None = None) -> Checkpoint | None:
    """The tensors of the repository by its safetensors headers; None where it has no such files.

    Errors: as `fetch_config`, and InputError for headers that contradict themselves.
    """
    hub = _huggingface_hub()
    try:
        found = _asked(repo, lambda: hub.get_safetensors_metadata(repo))
    except InputError as error:
        if isinstance(error.__cause__, _errors(hub, "NotASafetensorsRepoError")):
            return None
        raise
    tensors: list[StoredTensor] = []
    where = f"{_SITE}/{repo}"
    if len(found.files_metadata) > MAX_FILES:
        raise _broken(repo, f"has more than {MAX_FILES:,} files")
    for shard, header in found.files_metadata.items():
        if len(tensors) + len(header.tensors) > MAX_TENSORS:
            raise _broken(repo, f"has more than {MAX_TENSORS:,} tensors")
        tensors += [_tensor(repo, shard, name, info) for name, info in header.tensors.items()]
    if len({tensor.name for tensor in tensors}) != len(tensors):
        raise _broken(repo, "has the same tensor in two files")
    if not tensors:
        return None
    return Checkpoint(
        path=Path(where),
        format="safetensors",
        tensors=tuple(tensors),
        metadata={},
        files=len(found.files_metadata),
        quantization_config=quantization_config,
    )


def _huggingface_hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ExtraMissingError(
            "the huggingface_hub package is not installed",
            where="--online",
            hint="pip install 'capplan[hub]'",
        ) from None
    return huggingface_hub


def _errors(hub: Any, *names: str) -> tuple[type[BaseException], ...]:
    """Those of the package's error classes that this version has."""
    found = (getattr(hub.errors, name, None) for name in names)
    return tuple(error for error in found if error is not None)


def _asked(repo: str, question: Callable[[], _T]) -> _T:
    """The answer, or one of this program's errors; the package's own message is the last resort."""
    hub = _huggingface_hub()
    where = f"{_SITE}/{repo}"
    try:
        return question()
    except _errors(hub, "GatedRepoError") as error:
        raise InputError(
            f"{repo} is gated: its publisher gives access on request (HTTP 401 or 403)",
            where=where,
            hint="accept its terms on that page, then log in with `hf auth login` or set HF_TOKEN",
        ) from error
    except _errors(hub, "RepositoryNotFoundError", "RevisionNotFoundError", "HFValidationError") as error:
        raise InputError(
            f"no repository {shown(repo)} that this login may see (HTTP 401 or 404)",
            where=where,
            hint="check the spelling; a private one needs `hf auth login` or HF_TOKEN",
        ) from error
    except _errors(hub, "OfflineModeIsEnabled", "LocalEntryNotFoundError") as error:
        raise NetworkError(
            f"{repo} is not in the local cache and the Hub cannot be asked",
            where=where,
            hint="check the connection and HF_HUB_OFFLINE, or give the path of its config.json",
        ) from error
    except _errors(hub, "EntryNotFoundError", "NotASafetensorsRepoError") as error:
        raise InputError(
            f"{repo} has no such file (HTTP 404)",
            where=where,
            hint="only repositories with a transformers config.json can be planned",
        ) from error
    except _errors(hub, "SafetensorsParsingError") as error:
        raise _broken(repo, "has a safetensors header that cannot be parsed") from error
    except _errors(hub, "HfHubHTTPError") as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status in (401, 403):
            raise InputError(
                f"access to {repo} is refused (HTTP {status})",
                where=where,
                hint="log in with `hf auth login` or set HF_TOKEN; a gated model wants its terms accepted",
            ) from error
        raise _unreachable(where, error) from error
    except (OSError, ValueError) as error:
        raise _unreachable(where, error) from error
    except Exception as error:
        # The HTTP libraries behind the package change with its version; theirs are all network errors.
        if type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "requests", "urllib3"):
            raise _unreachable(where, error) from error
        raise


def _unreachable(where: str, error: BaseException) -> NetworkError:
    return NetworkError(
        f"the Hub cannot be reached: {shown(str(error), 120)}",
        where=where,
        hint="check the connection, or give the path of a config.json",
    )


def _broken(repo: str, problem: str) -> InputError:
    return InputError(f"{repo} {problem}", where=f"{_SITE}/{repo}", hint="tell its publisher")


def _tensor(repo: str, shard: str, name: str, info: Any) -> StoredTensor:
    """One header entry, checked as a file's would be: its shape and dtype must give its bytes."""
    problem = name_problem(name)
    shape = tuple(info.shape)
    bits = DTYPE_BITS.get(info.dtype, 0)
    elements = 1
    for width in shape:
        if type(width) is not int or not 0 <= width <= MAX_ELEMENTS:
            problem = f"has the dimension {shown(width)}"
            break
        elements *= width
    begin, end = info.data_offsets
    if problem is None and (not bits or elements * bits != 8 * (end - begin)):
        problem = f"of {shown(info.dtype)} {shown(shape)} does not take {end - begin} bytes"
    if problem:
        raise _broken(repo, f"has a tensor {shown(name)} that {problem}")
    return StoredTensor(
        name=name, dtype=info.dtype, shape=shape, stored_bytes=elements * bits // 8, shard=shard
    )

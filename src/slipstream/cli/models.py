"""`slipstream models`: the catalogue, and what is on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A complete model folder of the Slipstream cache."""

    name: str
    path: Path
    bytes: int
    source: str


def cached_models() -> list[CachedModel]:
    """All complete model folders of the cache, by name; broken or half-made ones are not listed."""
    from slipstream.model.store import Store

    return _complete(Store.default().root / "models")


def _complete(folder: Path) -> list[CachedModel]:
    from slipstream.model.store import folder_bytes, manifest

    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        record = manifest(path)
        if record is not None and not path.name.startswith("."):  # a conversion in progress
            source = str(record.get("source", ""))
            found.append(CachedModel(path.name, path, folder_bytes(path), source))
    return found


def int8_copies() -> list[CachedModel]:
    """The int8 weights in the cache that were made from checkpoints; source: the checkpoint's folder."""
    from slipstream.model.store import Store

    return _complete(Store.default().root / "int8")


def models(json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the catalogue and the models in the cache."""
    from slipstream.cli.output import plain_table, print_json, stdout
    from slipstream.model.catalogue import CATALOGUE
    from slipstream.model.house import house_models
    from slipstream.model.progress import size
    from slipstream.model.store import Store, folder_bytes, reading_errors

    house = {name: (path, folder_bytes(path)) for name, path in house_models().items()}
    root = Store.default().root
    with reading_errors(root):
        cached = {model.name: model for model in cached_models()}
        int8 = int8_copies()
    catalogue: list[dict[str, Any]] = [
        {
            "name": entry.name,
            "hub_id": entry.hub_id,
            "licence": entry.licence,
            "parameters": entry.parameters,
            "layers": entry.layers,
            "hidden": entry.hidden,
            "vocabulary": entry.vocabulary,
            "download_bytes": entry.wheel_bytes,
            "converted_bytes": entry.converted_bytes,
            "path": str(cached[entry.name].path) if entry.name in cached else None,
        }
        for entry in CATALOGUE
    ]
    others = [m for m in cached.values() if m.name not in {entry.name for entry in CATALOGUE}]
    if json_:
        listed = [
            {"name": m.name, "path": str(m.path), "bytes": m.bytes, "source": m.source}
            for m in cached.values()
        ]
        shipped = [{"name": n, "path": str(path), "bytes": count} for n, (path, count) in house.items()]
        copies = [{"of": m.source, "path": str(m.path), "bytes": m.bytes} for m in int8]
        print_json(
            {
                "cache": str(root),
                "catalogue": catalogue,
                "house": shipped,
                "cached": listed,
                "int8": copies,
            }
        )
        return
    console = stdout()
    table = plain_table("CATALOGUE", "PARAMETERS", "LAYERS", "DOWNLOAD", "ON DISK", "LICENCE", "STATE")
    for entry in CATALOGUE:
        state = "cached" if entry.name in cached else f"slipstream pull {entry.name}"
        on_disk = cached[entry.name].bytes if entry.name in cached else entry.converted_bytes
        table.add_row(
            entry.name,
            f"{entry.parameters / 1e9:.2f} B",
            f"{entry.layers} × {entry.hidden}",
            size(entry.wheel_bytes),
            size(on_disk),
            entry.licence,
            state,
        )
    console.print(table)
    if house:
        own = plain_table("\nHOUSE MODELS", "\nON DISK", "\nSTATE")
        for name, (_, count) in house.items():
            own.add_row(name, size(count), "comes with Slipstream, drafters included")
        console.print(own)
    if others:
        more = plain_table("\nCONVERTED FILES", "\nON DISK", "\nFROM")
        for model in others:
            more.add_row(model.name, size(model.bytes), model.source)
        console.print(more)
    if int8:
        copies_of = plain_table("\nINT8 WEIGHTS OF", "\nON DISK")
        for copy in int8:
            copies_of.add_row(copy.source, size(copy.bytes))
        console.print(copies_of)
    console.print(f"\ncache: {root}", markup=False, soft_wrap=True)

"""Ways of drafting. One file each; a new file is found by its name, nothing is registered.

`--drafter mine` finds `slipstream/drafters/mine.py`, then the entry points of the group
`slipstream.drafters`; `--drafter ./mine.py:Mine` and `--drafter package.module:Mine` load a class from
anywhere. A drafter module is imported only when it is asked for.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
import traceback
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from slipstream.core.draft import Drafter
from slipstream.core.places import expanded
from slipstream.core.spec import make_config, parse_spec
from slipstream.drafters._config_source import config_without_import
from slipstream.drafters.base import MemoryEstimate, TargetInfo, TargetShape
from slipstream.errors import DrafterError, ParameterError, SlipstreamError

__all__ = [
    "TargetInfo",
    "TargetShape",
    "build_drafter",
    "check_drafter_spec",
    "check_spec",
    "configure",
    "find_drafter",
    "list_drafters",
    "predict_memory",
]

GROUP = "slipstream.drafters"
_NOT_DRAFTERS = {"base"}


def _files() -> dict[str, Path]:
    """Drafter name -> module file, for the drafters that ship with Slipstream."""
    folder = Path(__file__).parent
    names = (m.name for m in pkgutil.iter_modules([str(folder)]) if m.name not in _NOT_DRAFTERS)
    return {name: folder / f"{name}.py" for name in names if not name.startswith("_")}


def list_drafters() -> list[dict[str, str]]:
    """name, where and summary of every drafter that can be named, without importing any."""
    found = [
        {"name": name, "where": "built in", "summary": _summary(path)}
        for name, path in sorted(_files().items())
    ]
    for point in sorted(entry_points(group=GROUP), key=lambda p: p.name):
        found.append({"name": point.name, "where": point.value, "summary": "installed plug-in"})
    return found


def _summary(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0] if text else ""


def find_drafter(name: str) -> type[Drafter]:
    """The class that `name` means."""
    if ":" in name:
        return _from_path(name)
    if name in _files():
        return _only_drafter(importlib.import_module(f"slipstream.drafters.{name}"), name)
    for point in entry_points(group=GROUP):
        if point.name == name:
            try:
                found = point.load()
            except Exception as error:  # whatever a stranger's package raises when it is imported
                raise _broken(name, error) from error
            return _checked(found, name)
    raise _unknown(name)


def _unknown(name: str) -> DrafterError:
    known = [d["name"] for d in list_drafters()]
    close = difflib.get_close_matches(name, known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(known)}"
    return DrafterError(f"unknown drafter {name!r}; {hint} (or FILE.py:Class)")


def check_spec(spec: str) -> None:
    """Refuse a mistyped name or option at once: nothing is imported, which for some drafters takes seconds.

    What only the drafter itself knows of its values is not checked. Raises DrafterError, ParameterError.
    """
    name, values = parse_spec(spec)
    if ":" in name:
        _file_of(name)
    elif name in _files():
        config = config_without_import(_files()[name])
        if config is not None:
            make_config(config, name, values)
    elif not any(point.name == name for point in entry_points(group=GROUP)):
        raise _unknown(name)


def _from_path(name: str) -> type[Drafter]:
    module_name, _, attribute = name.rpartition(":")
    path = _file_of(name)
    try:
        module = importlib.import_module(module_name) if path is None else _module_of(path)
    except Exception as error:  # whatever a stranger's file raises when it is imported
        raise _broken(name, error) from error
    if not hasattr(module, attribute):
        raise DrafterError(f"{module_name!r} has no class {attribute!r}")
    return _checked(getattr(module, attribute), name)


def _module_of(path: Path) -> ModuleType:
    """The file as a module that is found by its name: types in quotes, which all are after `from __future__
    import annotations`, are looked up there."""
    name = f"slipstream_drafter_{path.stem}_{zlib.crc32(os.fsencode(path.resolve())):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _file_of(name: str) -> Path | None:
    """The file of `FILE.py:Class`, None for `package.module:Class`."""
    module_name = name.rpartition(":")[0]
    if not module_name.endswith(".py"):
        first, _, rest = name.partition(":")
        if first in _files():  # draft_model:small instead of draft_model:model=small
            raise ParameterError(f"what follows {first!r} must be written key=value, not {rest!r}")
        return None
    path = expanded(module_name)
    if not path.is_file():
        raise DrafterError(f"drafter file {module_name!r} does not exist")
    return path


def _broken(name: str, error: Exception) -> DrafterError:
    return DrafterError(f"drafter {name!r} cannot be imported: {type(error).__name__}: {error}")


def _only_drafter(module: Any, name: str) -> type[Drafter]:
    own = [
        v
        for v in vars(module).values()
        if isinstance(v, type) and issubclass(v, Drafter) and v.__module__ == module.__name__
    ]
    if len(own) != 1:
        raise DrafterError(
            f"drafter module {name!r} must define exactly one Drafter class, it has {len(own)}"
        )
    return _checked(own[0], name)


def _checked(found: Any, name: str) -> type[Drafter]:
    if not (isinstance(found, type) and issubclass(found, Drafter)):
        raise DrafterError(f"{name!r} is not a class derived from slipstream.core.draft.Drafter")
    config = getattr(found, "Config", None)
    if not (isinstance(config, type) and is_dataclass(config)):
        raise DrafterError(f"drafter {name!r} needs a dataclass `Config` as a class attribute (its options)")
    return found


def check_drafter_spec(spec: object) -> None:
    """ParameterError for what is neither the name of a drafter nor one that is built."""
    if isinstance(spec, (str, Drafter)):
        return
    what = f"the class {spec.__name__}: make one of it" if isinstance(spec, type) else type(spec).__name__
    raise ParameterError(f"a drafter is a name with options or a built Drafter, not {what}")


def build_drafter(spec: str | Drafter, target: TargetInfo) -> Drafter:
    """From `name:key=value,…`; a drafter that is built already is taken as it is."""
    check_drafter_spec(spec)
    if isinstance(spec, Drafter):
        return spec
    found, config = configure(spec)
    with _named(spec, "built"):
        return found(config, target)  # type: ignore[call-arg]


def predict_memory(spec: str, target: TargetShape) -> MemoryEstimate:
    """What the drafter that `spec` names will hold beyond the target's own, without loading it."""
    found, config = configure(spec)
    with _named(spec, "asked for its memory"):
        return found.predict_memory(config, target)


def configure(spec: str) -> tuple[type[Drafter], Any]:
    """The drafter's class and its config, checked as far as it goes without a target."""
    name, values = parse_spec(spec)
    found = find_drafter(name)
    with _named(spec, "configured"):
        return found, make_config(found.Config, name, values)  # type: ignore[attr-defined]


@contextmanager
def _named(spec: str, what: str) -> Iterator[None]:
    """Turns whatever a stranger's code raises into one error that names the drafter and the line."""
    try:
        yield
    except SlipstreamError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise DrafterError(
            f"drafter {parse_spec(spec)[0]!r} cannot be {what}: {type(error).__name__}: {error}"
            f" ({Path(at.filename).name}, line {at.lineno})"
        ) from error

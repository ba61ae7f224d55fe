"""`slipstream drafters` and `slipstream controllers`: the ways of drafting, how much, and their options."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, Field, asdict, dataclass, field, fields
from typing import Annotated, Any

import typer


@dataclass(frozen=True, slots=True)
class Option:
    """One option. default is as it would be typed; None: it must be given."""

    name: str
    type: str
    default: str | None
    help: str


@dataclass(frozen=True, slots=True)
class Listed:
    """One drafter or controller. error: why it cannot be used, if so."""

    name: str
    summary: str
    where: str
    options: list[Option] = field(default_factory=list)
    error: str | None = None


def drafters(json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the ways of drafting (--drafter) and their options."""
    _show(
        "DRAFTER",
        listed(),
        json_,
        "--drafter NAME:option=value,option=value; one of your own: --drafter ./file.py:Class",
        "How much they draft is up to a controller: slipstream controllers",
    )


def controllers(json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List what decides how much is drafted (--controller) and its options."""
    _show(
        "CONTROLLER",
        listed_controllers(),
        json_,
        "--controller NAME:option=value,option=value",
        "Without --controller a drafter always drafts as much as its own num_speculative_tokens says;"
        " slipstream serve uses goodput.",
    )


def _show(what: str, found: list[Listed], json_: bool, *below: str) -> None:
    from slipstream.cli.output import plain_table, print_json, stdout

    if json_:
        print_json([asdict(one) for one in found])
        return
    table = plain_table(what, "OPTION=DEFAULT", "")
    for one in found:
        where = "" if one.where == "built in" else f" ({one.where})"
        summary = one.summary if one.error is None else f"cannot be used: {one.error}"
        table.add_row(f"[bold]{_plain(one.name)}", "", _plain(f"{summary}{where}"))
        for option in one.options:
            default = "…" if option.default is None else option.default
            table.add_row("", _plain(f"{option.name}={default}"), _plain(option.help))
    console = stdout()
    console.print(table)
    console.print("\n" + "\n".join(below), markup=False)


def listed() -> list[Listed]:
    """All drafters that can be named. One that cannot be imported is listed with the reason."""
    from slipstream.drafters import find_drafter, list_drafters

    found = []
    for entry in list_drafters():
        name, where, summary = entry["name"], entry["where"], entry["summary"]
        try:
            kind: Any = find_drafter(name)
            if where != "built in":
                # not inspect.getdoc, which would give the base class's
                summary = _first_line(kind.__doc__ or inspect.getmodule(kind).__doc__) or summary
            found.append(Listed(name, summary, where, options(kind.Config)))
        except Exception as error:  # a module that breaks must not take the list with it
            found.append(Listed(name, summary, where, error=" ".join(str(error).split())))
    return found


def listed_controllers() -> list[Listed]:
    """All controllers that can be named."""
    from slipstream.control import KINDS

    return [
        Listed(name, _first_line(inspect.getmodule(kind).__doc__), "built in", options(kind.Config))
        for name, kind in sorted(KINDS.items())
    ]


def options(config: type[Any]) -> list[Option]:
    """The fields of a config dataclass, explained by its docstring."""
    known = [f for f in fields(config) if f.init]
    told = explanations(inspect.getdoc(config) or "", [f.name for f in known])
    return [Option(f.name, _type(f), _default(f), told.get(f.name, "")) for f in known]


def explanations(text: str, names: list[str]) -> dict[str, str]:
    """Reads `first, second: what they are. third: …` as config docstrings write it."""
    if not names:
        return {}
    one = "|".join(map(re.escape, names))
    heads = list(re.finditer(rf"(?:^|(?<=\s))((?:{one})(?:(?:, | and )(?:{one}))*):\s", text))
    told = {}
    for head, after in zip(heads, [*heads[1:], None], strict=True):
        explained = text[head.end() : after.start() if after else None].split("\n\n")[0]
        for name in re.findall(rf"\b(?:{one})\b", head[1]):
            told[name] = " ".join(explained.split()).rstrip(".")
    return told


def _type(f: Field[Any]) -> str:
    return f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type))


def _default(f: Field[Any]) -> str | None:
    if f.default is MISSING and f.default_factory is MISSING:
        return None
    value = f.default if f.default_factory is MISSING else f.default_factory()
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _first_line(text: str | None) -> str:
    return text.splitlines()[0] if text else ""


def _plain(text: str) -> str:
    return text.replace("[", r"\[")

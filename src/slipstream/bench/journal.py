"""What a bench has measured so far, on disk line by line, so that a killed run goes on where it was."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from slipstream.bench.bundle import BenchBundle, DrafterNote, Head, Run, SessionNote
from slipstream.errors import ParameterError
from slipstream.model import disk
from slipstream.model.store import write_atomic

_MORE = ("rounds",)  # of a plan: what may change between two runs of one bench


def journal_of(out: Path) -> Path:
    """Beside the bundle; it is gone when the bundle is complete."""
    return out.with_name(f"{out.name}.partial")


def keep_bundle(out: Path, bundle: BenchBundle) -> None:
    """The bundle as a file, whole or not at all; what is complete needs no journal any more."""
    with disk.writing(out):
        write_atomic(out, bundle.model_dump_json(indent=1) + "\n")
        if bundle.complete:
            journal_of(out).unlink(missing_ok=True)


class Journal:
    """The runs of one bench. path None: nothing is kept on disk.

    Raises ParameterError where the file holds runs of another bench, and names what differs.
    """

    def __init__(self, path: Path | None, head: Head) -> None:
        self.head = head
        self.path = path
        self.drafters: dict[str, DrafterNote] = {}
        self.sessions: list[SessionNote] = []
        self.runs: dict[tuple[int, int, int], Run] = {}  # by round, unit, setting
        known = self._read()
        if not known:
            self._append("head", head)

    def _read(self) -> bool:
        found = False
        lines = list(disk.read_lines(self.path, mend=True)) if self.path else []
        if self.path is not None and lines and not any("run" in line for line in lines):
            self.path.unlink()  # nothing was measured, so nothing is lost if another bench takes its place
            return False
        for line in lines:
            try:
                ((kind, value),) = line.items()
                if (kind == "head") is found:
                    raise ValueError("a bench begins with its head, and has one")
                self._take(kind, value)
            except (ValidationError, ValueError, AttributeError, KeyError, TypeError) as error:
                if isinstance(error, ParameterError):
                    raise
                raise ParameterError(
                    f"{self.path} is damaged: delete it to begin again, or give another --out"
                ) from None
            found = True
        return found

    def _take(self, kind: str, value: Any) -> None:
        if kind == "head":
            self._same(Head.model_validate(value))
        elif kind == "session":
            self.sessions.append(SessionNote.model_validate(value))
        elif kind == "drafter":
            note = DrafterNote.model_validate(value)
            self.drafters[note.drafter] = note
        else:
            run = {"run": Run}[kind].model_validate(value)
            places = (run.setting, len(self.head.settings)), (run.session, len(self.sessions))
            if any(place >= count for place, count in places) or run.unit >= len(self.head.units):
                raise ValueError("a run of what there is not")
            if [a.prompt for a in run.answers] != self.head.units[run.unit].prompts:
                raise ValueError("answers to other prompts")
            self.runs[run.round, run.unit, run.setting] = run

    def _same(self, then: Head) -> None:
        before, now = then.model_dump(), self.head.model_dump()
        places = [("plan", k) for k in now["plan"] if k not in _MORE]
        places += [("target", k) for k in now["target"]]
        for place, key in places:
            if before[place][key] != now[place][key]:
                raise self._other(f"{key} {before[place][key]!r}, now it is {now[place][key]!r}")
        for name in ("prompts", "settings", "units"):
            if before[name] != now[name]:
                raise self._other(f"other {name}")

    def _other(self, what: str) -> ParameterError:
        return ParameterError(
            f"{self.path} holds a bench that was begun with {what}: give another --out, or delete it to"
            " begin again"
        )

    # -- adding ---------------------------------------------------------------------------------

    def start(self, session: SessionNote, drafters: list[DrafterNote]) -> int:
        """A process begins; gives its place among the sessions."""
        self._append("session", session)
        self.sessions.append(session)
        for note in drafters:
            if note.drafter not in self.drafters:
                self._append("drafter", note)
                self.drafters[note.drafter] = note
        return len(self.sessions) - 1

    def add(self, run: Run) -> None:
        self._append("run", run)
        self.runs[run.round, run.unit, run.setting] = run

    def _append(self, kind: str, value: Head | SessionNote | DrafterNote | Run) -> None:
        if self.path is not None:
            disk.append_line(self.path, {kind: value.model_dump(mode="json")})

    # -- the end --------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        head = self.head
        return all(
            (round_, u, s) in self.runs
            for round_ in range(head.plan.rounds)
            for u, unit in enumerate(head.units)
            for s, setting in enumerate(head.settings)
            if (unit.batch, unit.temperature) == (setting.batch, setting.temperature)
        )

    def bundle(self) -> BenchBundle:
        """Everything so far. ParameterError where there is nothing yet."""
        if not self.runs:
            raise ParameterError("nothing was measured: the time was too short for one unit; give more")
        return BenchBundle(
            **self.head.model_dump(),
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            complete=self.complete,
            drafters=list(self.drafters.values()),
            sessions=self.sessions,
            runs=[self.runs[key] for key in sorted(self.runs)],
        )

"""How much memory this process may still take: of the machine, of its container, of its own limit."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil

from slipstream.errors import CapacityError
from slipstream.model.progress import size

_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


def available() -> int:
    """Bytes this process may still allocate."""
    limits = [int(psutil.virtual_memory().available), _cgroup_room(Path("/")), _process_room()]
    return max(0, min(limit for limit in limits if limit is not None))


def total() -> int:
    """Bytes of memory of the machine, or of the container when that is less."""
    limit = cgroup_limit(Path("/"))
    whole = int(psutil.virtual_memory().total)
    return whole if limit is None else min(whole, limit)


def require(needed: int, what: str, fix: str) -> None:
    """CapacityError unless `needed` bytes are available."""
    there = available()
    if needed > there:
        raise CapacityError(f"{what} needs {size(needed)} of memory and {size(there)} are available: {fix}")


def ran_out(error: BaseException) -> bool:
    """Whether an exception means that an allocation failed: torch and safetensors say it only in words."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text


def cgroup_limit(root: Path) -> int | None:
    """The tightest memory limit of this process's control groups, None without one."""
    return min((limit for limit, _ in _cgroups(root)), default=None)


def _cgroup_room(root: Path) -> int | None:
    return min((limit - used for limit, used in _cgroups(root)), default=None)


def _cgroups(root: Path) -> list[tuple[int, int]]:
    """(limit, used) in bytes of each limited group from this process's own up to the top; v1 and v2.

    Page cache the kernel can drop at once (inactive files) does not count as used.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's and not exist here: the top is then the container's own
        own = base / path.strip("/")
        for folder in (own, *(p for p in own.parents if p == base or base in p.parents)):
            limit, used = _number(folder / names[0]), _number(folder / names[1])
            if limit is not None and used is not None and limit < _UNLIMITED:
                found.append((limit, used - _stat(folder / "memory.stat", names[2])))
    return found


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _stat(path: Path, key: str) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get(key, 0))


def _process_room() -> int | None:
    """What `ulimit -v` leaves."""
    if sys.platform == "win32":
        return None
    import resource

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return limit - int(psutil.Process().memory_info().vms)

"""Machines by their data sheets: memory, bandwidth, arithmetic by dtype, and a rough price.

Bandwidth and arithmetic are the makers' peaks, without sparsity; for GeForce cards with fp32 accumulation.
Prices are on-demand rents of one device in USD an hour, rounded middles of what providers listed in
2026; they differ threefold between providers, so give your own.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.core import jsontext
from slipstream.errors import ParameterError

# What kernels reach of the peaks, and what a layer's launches cost: assumptions, said in every report.
REACHED_BANDWIDTH, REACHED_FLOPS, GPU_LAYER_SECONDS = 0.8, 0.6, 20e-6
_FALLBACK = {"bfloat16": "float16", "float16": "bfloat16", "float8": "int8", "int8": "float8"}
_LEAST, _MOST = 1e-6, 1e9  # what a machine file may say in its units: beyond, it is a slip
_FIELDS = ("name", "memory_gb", "bandwidth_gbs", "tflops", "price", "layer_seconds")
_NEEDED = _FIELDS[:4]
MOST_GPUS = 1_000_000
DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True)
class Machine:
    """memory in bytes, bandwidth in bytes a second, flops by dtype in operations a second, price in USD an
    hour (None: unknown). reached_*: the share of the peaks that is counted on. layer_seconds: fixed cost of
    a layer, whatever it computes."""

    name: str
    memory: float
    bandwidth: float
    flops: dict[str, float] = field(default_factory=dict)
    price: float | None = None
    reached_bandwidth: float = REACHED_BANDWIDTH
    reached_flops: float = REACHED_FLOPS
    layer_seconds: float = GPU_LAYER_SECONDS

    def flops_of(self, dtype: str) -> float:
        """Peak operations a second of a matrix product in this dtype; int4 weights compute in 16 bits."""
        for name in (dtype, _FALLBACK.get(dtype, ""), "bfloat16", "float16", "float32"):
            if name in self.flops:
                return self.flops[name]
        raise ParameterError(f"{self.name} has no arithmetic rate for {dtype}; describe it in a file")

    def ridge(self, dtype: str) -> float:
        """Operations a byte from which arithmetic, not memory, takes the time (reached rates)."""
        return self.flops_of(dtype) * self.reached_flops / (self.bandwidth * self.reached_bandwidth)

    def times(self, count: int) -> Machine:
        """So many of them as one, their communication not counted."""
        if not 1 <= count <= MOST_GPUS:
            least = f"at least 1, not {count}" if count < 1 else f"at most {MOST_GPUS}"
            raise ParameterError(f"the number of GPUs must be {least}")
        if count == 1:
            return self
        return replace(
            self,
            name=f"{count} × {self.name}",
            memory=self.memory * count,
            bandwidth=self.bandwidth * count,
            flops={k: v * count for k, v in self.flops.items()},
            price=None if self.price is None else self.price * count,
        )


def _gpu(
    name: str,
    gb: float,
    gbs: float,
    half: float,
    single: float,
    eight: float = 0.0,
    price: float | None = None,
) -> Machine:
    """From data-sheet units: GB, GB/s, TFLOP/s in 16 bits, 32 bits and 8 bits."""
    flops = {"bfloat16": half * 1e12, "float16": half * 1e12, "float32": single * 1e12}
    if eight:
        flops |= {"int8": eight * 1e12, "float8": eight * 1e12}
    return Machine(name, gb * 1e9, gbs * 1e9, flops, price)


def _cpu(name: str, gb: float, gbs: float, single: float, half: float) -> Machine:
    flops = {"float32": single * 1e12, "bfloat16": half * 1e12}
    return Machine(name, gb * 1e9, gbs * 1e9, flops, layer_seconds=0.0)


MACHINES = {
    m.name: m
    for m in (
        _gpu("a10", 24, 600, 125, 31.2, 250, 0.75),
        _gpu("a100-40gb", 40, 1555, 312, 19.5, 624, 1.30),
        _gpu("a100-80gb", 80, 2039, 312, 19.5, 624, 1.80),
        _gpu("b200", 180, 8000, 2250, 80, 4500, 6.00),
        _gpu("h100-pcie", 80, 2000, 756, 51, 1513, 2.40),
        _gpu("h100-sxm", 80, 3350, 989, 67, 1979, 2.95),
        _gpu("h200", 141, 4800, 989, 67, 1979, 3.80),
        _gpu("l4", 24, 300, 121, 30.3, 242, 0.70),
        _gpu("l40s", 48, 864, 362, 91.6, 733, 0.90),
        _gpu("mi300x", 192, 5300, 1307, 163.4, 2615, 2.50),
        _gpu("rtx-3090", 24, 936, 71, 35.6, 284, 0.25),
        _gpu("rtx-4090", 24, 1008, 165, 82.6, 330, 0.40),
        _gpu("rtx-5090", 32, 1792, 210, 104.8, 419, 0.70),
        _gpu("t4", 16, 320, 65, 8.1, 130, 0.35),
        _gpu("v100-32gb", 32, 900, 125, 15.7, 0, 0.55),
        _cpu("epyc-9654", 768, 460.8, 7.4, 14.7),
        _cpu("xeon-8480", 512, 307.2, 7.2, 115),
        _cpu("ryzen-7950x", 64, 83.2, 2.3, 4.6),
        _cpu("laptop-ddr5", 32, 89.6, 0.9, 0.9),
    )
}
ALIASES = {
    "a100": "a100-80gb",
    "h100": "h100-sxm",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
}


def find_machine(name: str) -> Machine:
    """By name (`h100-sxm`, `RTX 4090`) or from a JSON file that describes one."""
    path = Path(name)
    if path.suffix == ".json":
        return read_machine(path)
    wanted = re.sub(r"[\s_]+", "-", name.strip().lower()).removeprefix("nvidia-").removeprefix("geforce-")
    wanted = ALIASES.get(wanted, wanted)
    if wanted in MACHINES:
        return MACHINES[wanted]
    known = [*MACHINES, *ALIASES]
    close = [n for n in known if wanted and (n.startswith(wanted) or wanted.startswith(n))]
    close = close or difflib.get_close_matches(wanted, known, 3, 0.5)
    hint = f"did you mean {' or '.join(close[:3])}?" if close else f"known are {', '.join(MACHINES)}."
    raise ParameterError(
        f"unknown GPU {name!r}: {hint} Describe any other in a JSON file with name, memory_gb, bandwidth_gbs,"
        " tflops and price"
    )


def read_machine(path: Path) -> Machine:
    """From a JSON file with name, memory_gb, bandwidth_gbs, tflops by dtype and, if known, price and
    layer_seconds. Other fields are refused: a mistyped price would be no price."""
    found = read_json_object(path, "a machine")

    def number(key: str, value: Any, least: float = _LEAST) -> float:
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not known or not (value > 0 or least == value == 0):
            sign = "positive number" if least else "number of 0 or more"
            raise ParameterError(f"{path}: {key} must be a {sign}, not {_short(value)}")
        if not least <= value <= _MOST:
            raise ParameterError(f"{path}: {key} is {_short(value)}, which no machine has: check its unit")
        return float(value)

    for key in _NEEDED:
        if key not in found:
            raise ParameterError(f"{path}: {key} is missing; needed are {', '.join(_NEEDED)}")
    unknown = next((key for key in found if key not in _FIELDS), None)
    if unknown is not None:
        raise ParameterError(f"{path}: unknown field {unknown!r}; there are {', '.join(_FIELDS)}")
    name, tflops, price = found["name"], found["tflops"], found.get("price")
    if not isinstance(name, str) or not name.strip():
        raise ParameterError(f"{path}: name must be a text, not {_short(name)}")
    if not isinstance(tflops, dict) or not tflops or not set(tflops) <= set(DTYPE_BYTES):
        raise ParameterError(f'{path}: tflops must be like {{"bfloat16": 100}}, by {", ".join(DTYPE_BYTES)}')
    return Machine(
        name,
        number("memory_gb", found["memory_gb"]) * 1e9,
        number("bandwidth_gbs", found["bandwidth_gbs"]) * 1e9,
        {k: number(f"tflops.{k}", v) * 1e12 for k, v in tflops.items()},
        None if price is None else number("price", price),
        layer_seconds=number("layer_seconds", found.get("layer_seconds", GPU_LAYER_SECONDS), 0.0),
    )


def _short(value: Any) -> str:
    told = repr(value)
    return told if len(told) <= 40 else f"{told[:40]}…"


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """A JSON object from a file. ParameterError in one line where it cannot be read."""
    try:
        found = jsontext.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ParameterError(f"{path} cannot be read ({error.strerror}): check the path") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path} is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ParameterError(f"{path} must hold a JSON object that describes {what}")
    return found

"""The machine this runs on: what a measurement says of it, and whether it was quiet."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

from slipstream.cost.bundle import MachineInfo
from slipstream.model import memory


def this_machine(
    device: torch.device, *, bandwidth: float | None = None, flops: Mapping[str, float] | None = None
) -> MachineInfo:
    """bandwidth: bytes a second that were measured. flops: operations a second likewise, by dtype."""
    cpu = device.type == "cpu"
    return MachineInfo(
        name=machine_name(device),
        device=device.type,
        threads=torch.get_num_threads(),
        memory_bytes=memory.total() if cpu else torch.cuda.get_device_properties(device).total_memory,
        bandwidth=bandwidth,
        flops=dict(flops or {}),
    )


def machine_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores ({platform.node()})"


def processor(device: torch.device) -> str:
    """The model of what computes, and how many cores: the same for machines that are equally fast, whatever
    they are called."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{cpu_name()}, {os.cpu_count()} cores"


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load_average() -> float:
    """Processes that ran or wanted to, the mean of the last minute."""
    return float(psutil.getloadavg()[0])


def load_reasons() -> list[str]:
    """Why the machine is not quiet before anything was measured."""
    load, cores = load_average(), os.cpu_count() or 1
    return [f"the load was {load:.1f} on {cores} cores at the start"] if load > 0.5 * cores else []

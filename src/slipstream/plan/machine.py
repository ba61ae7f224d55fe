"""This machine: what it is called, and whether it was quiet enough to measure on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch

from slipstream.cost.bundle import MachineInfo
from slipstream.model import memory


def processor(device: torch.device) -> str:
    """The model of what computes, and how many cores; the same for equal machines."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def machine_info(
    device: torch.device, bandwidth: float | None = None, flops: dict[str, float] | None = None
) -> MachineInfo:
    """As measurements tell it."""
    cpu = device.type == "cpu"
    return MachineInfo(
        name=f"{processor(device)} ({platform.node()})" if cpu else processor(device),
        device=device.type,
        threads=torch.get_num_threads(),
        memory_bytes=memory.total() if cpu else torch.cuda.get_device_properties(device).total_memory,
        bandwidth=bandwidth,
        flops=flops or {},
    )


def load_reasons() -> list[str]:
    """Why the machine is not quiet before anything was measured."""
    load, cores = psutil.getloadavg()[0], os.cpu_count() or 1
    return [f"the load was {load:.1f} on {cores} cores at the start"] if load > 0.5 * cores else []

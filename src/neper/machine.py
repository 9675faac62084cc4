"""What this machine is: its processor and its free memory, read from the system, and sizes in words."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Instruction sets by the kernel's names (avx512_bf16, amx_bf16, ...); empty where the system does not tell."""
    return frozenset(_cpuinfo("flags").split())


def available_memory() -> int:
    """Bytes of memory that can be taken without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 4 * 2**30


def format_size(size: float) -> str:
    """A size for people, in binary units: 16 MiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.1f}".removesuffix(".0") + f" {units[0]}"


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")

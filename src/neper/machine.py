"""This machine's processors and free memory, read from the system, and sizes in words."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_flags() -> frozenset[str]:
    """Instruction sets by the kernel's names (avx512_bf16, amx_bf16, ...); empty where the system does not tell."""
    return frozenset(_cpuinfo("flags").split())


class Cpus(NamedTuple):
    """The number of processors that this process may use.

    Attributes:
        total: those of the machine.
        affinity: those that the process may run on.
        quota: the time that control groups grant, in processors; None = no limit.
    """

    total: int
    affinity: int
    quota: float | None

    @property
    def usable(self) -> int:
        """The least of all bounds, at least one.

        A quota is rounded down. More threads would use it up early, and then wait for the next period.
        """
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota)))

    def __str__(self) -> str:
        """The bounds that hold, for people: "of 8 cores, 4 by affinity, 1.5 by cgroup quota"."""
        bounds = [f"of {self.total} core{'s' * (self.total != 1)}"]
        if self.affinity < self.total:
            bounds.append(f"{self.affinity} by affinity")
        if self.quota is not None:
            bounds.append(f"{self.quota:.3g} by cgroup quota")
        return ", ".join(bounds)


def cpus(root: Path = Path("/")) -> Cpus:
    """The bounds on this process's share of the processors.

    Args:
        root: the directory that has proc/self and sys/fs/cgroup; tests have their own.
    """
    total = os.cpu_count() or 1
    affinity = total
    if hasattr(os, "sched_getaffinity"):  # Linux
        affinity = len(os.sched_getaffinity(0))
    elif hasattr(os, "process_cpu_count"):  # Python 3.13
        affinity = os.process_cpu_count() or total
    return Cpus(total, affinity, _cgroup_quota(root))


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


def _cgroup_quota(root: Path) -> float | None:
    """The processors that control groups grant: the least of this process's group and those around it.

    Version 2 has a quota and its period in cpu.max. Version 1 has them in two files of the controller cpu. A container
    may see its own group as the root of the mount, while /proc/self/cgroup has the host's name for it. So the path is
    looked for below the mount, and directories that do not exist are passed over.
    """
    quotas: list[float] = []
    for mount, group in _cgroup_places(root):
        parts = [part for part in group.parts if part not in ("/", "..")]
        for depth in range(len(parts), -1, -1):
            quotas += _quota_of(mount.joinpath(*parts[:depth]))
    return min(quotas, default=None)


def _cgroup_places(root: Path) -> Iterator[tuple[Path, Path]]:
    """The mounts of the hierarchies that may limit processor time, each with this process's group below it."""
    groups: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):  # 4:cpu,cpuacct:/path, or 0::/path in version 2
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        groups |= dict.fromkeys(controllers.split(","), path)
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, kind = line.partition(" - ")
        columns, kinds = fields.split(), kind.split()
        if len(columns) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        controller = "" if kinds[0] == "cgroup2" else "cpu"
        if controller in groups and (not controller or controller in kinds[2].split(",")):
            mounted, group = Path(columns[3]), Path(groups[controller])
            below = group.relative_to(mounted) if group.is_relative_to(mounted) else group
            yield root / columns[4].lstrip("/"), below


def _quota_of(group: Path) -> Iterator[float]:
    """The quota of one control group, if it has one."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()[:2]
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        if quota != "max" and float(quota) > 0 and float(period) > 0:
            yield float(quota) / float(period)
    except (OSError, ValueError):
        return


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _cpuinfo(field: str) -> str:
    lines = _lines(Path("/proc/cpuinfo"))
    return next((line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field), "")

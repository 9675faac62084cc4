"""What is known of the machine: the processors that this process may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from neper import machine
from neper.engine import settings

V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw"
V1 = "32 31 0:29 {} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"
MEMORY = "35 31 0:33 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"


def quota(root: Path, cgroup: str, mountinfo: str, files: dict[str, str]) -> float | None:
    """What is read where these files are all there is."""
    proc = root / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(f"23 0 0:21 / / rw - ext4 /dev/sda1 rw\n{mountinfo}\n")
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return machine.cpus(root).quota


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1.0),  # a container with a namespace of its own
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "300000 100000\n", "a/cpu.max": "50000 100000\n"}, 0.5),
        ("0::/a/b\n", {"a/b/cpu.max": "25000 50000\n", "a/cpu.max": "800000 100000\n", "c/cpu.max": "1 100000\n"}, 0.5),
        ("0::/docker/1f\n", {"cpu.max": "200000 100000\n"}, 2.0),  # named as the host does, mounted as its own root
        ("0::/../a\n", {"a/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {"cpu.max": "nonsense\n"}, None),
        ("0::/\n", {"cpu.max": ""}, None),
        ("", {"cpu.max": "100000 100000\n"}, None),
    ],
)
def test_case_75_the_tightest_quota_of_version_2_counts(
    tmp_path: Path, cgroup: str, files: dict[str, str], expected: float | None
) -> None:
    assert quota(tmp_path, cgroup, V2, files) == expected


@pytest.mark.parametrize(
    ("root", "files", "expected"),
    [
        ("/", {"": (-1, 100000), "docker": (-1, 100000), "docker/1f": (100000, 100000)}, 1.0),
        ("/", {"": (-1, 100000), "docker": (50000, 100000), "docker/1f": (100000, 100000)}, 0.5),
        ("/docker/1f", {"": (250000, 100000)}, 2.5),
        ("/", {"": (-1, 100000)}, None),
    ],
)
def test_case_75_and_that_of_version_1(
    tmp_path: Path, root: str, files: dict[str, tuple[int, int]], expected: float | None
) -> None:
    written = {}
    for group, numbers in files.items():
        for name, number in zip(("quota", "period"), numbers, strict=True):
            written[f"cpu,cpuacct/{group}/cpu.cfs_{name}_us"] = f"{number}\n"
    cgroup = "5:memory:/other\n4:cpu,cpuacct:/docker/1f\n0::/\n"
    assert quota(tmp_path, cgroup, f"{MEMORY}\n{V1.format(root)}", written) == expected


@pytest.mark.parametrize(
    ("cpus", "usable", "words"),
    [
        (machine.Cpus(8, 8, None), 8, "of 8 cores"),
        (machine.Cpus(8, 3, None), 3, "of 8 cores, 3 by affinity"),
        (machine.Cpus(8, 8, 1.5), 1, "of 8 cores, 1.5 by cgroup quota"),
        (machine.Cpus(8, 2, 4.0), 2, "of 8 cores, 2 by affinity, 4 by cgroup quota"),
        (machine.Cpus(1, 1, 0.1), 1, "of 1 core, 0.1 by cgroup quota"),
    ],
)
def test_case_75_the_least_bound_is_the_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, cpus: machine.Cpus, usable: int, words: str
) -> None:
    monkeypatch.setattr(machine, "cpus", lambda: cpus)
    assert settings.choose_threads(None) == cpus.usable == usable
    assert settings.choose_threads(5) == 5
    assert str(cpus) == words


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity cannot be set on this system")
def test_case_75_a_process_pinned_to_one_core_has_one() -> None:
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from neper import machine; print(machine.cpus().affinity, machine.cpus().usable)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.split() == ["1", "1"]

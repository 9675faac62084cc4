"""`neper bench engine`: what logprobs cost a whole engine, and how far its decode steps are from the memory's speed.

Everything is a ratio within one run: the cases of a table take turns, a batch each a round. The run is cut into parts;
what a part has found is on disk when the next one begins.
"""

from __future__ import annotations

import logging
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from neper.bench import engine_cases, engine_plot, engine_report
from neper.bench.engine_cases import FULL, PARTS, QUICK
from neper.bench.engine_parts import Parts
from neper.bench.engine_report import EngineReport, Findings
from neper.bench.engine_rig import OutOfTime, Rig
from neper.bench.kernel_report import slug
from neper.config import DEFAULT_MODEL, EngineConfig
from neper.engine import settings
from neper.errors import NeperError, StartupError
from neper.models import registry, shapes, source
from neper.progress import ProgressLine

DEFAULT_SHAPE = "qwen3-4b"
"""Where there is a GPU and no model was named."""

logger = logging.getLogger("neper.bench")


def run(
    out: str | None,
    *,
    model: str | None = None,
    shape: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
    rounds: int | None = None,
    concurrency: tuple[int, ...] | None = None,
    parts: tuple[str, ...] = PARTS,
    quick: bool = False,
    time_limit: float | None = None,
) -> None:
    """Measure, print the tables, and write `engine-<card>-<model>.json` and `.md` into the directory `out`.

    Args:
        out: None = print only.
        model, shape: one of both at most; None = the default model on a CPU, `DEFAULT_SHAPE` on a GPU.
        time_limit: seconds after which no further batch is begun.

    Raises:
        StartupError: arguments that do not go together, or that the machine cannot meet.
        NeperError: a part failed; the others are measured and written before.
    """
    started = time.perf_counter()
    if model is not None and shape is not None:
        raise StartupError("bench engine: give --model or --shape, not both")
    if unknown := [part for part in parts if part not in PARTS]:
        raise StartupError(f"bench engine: no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    config = EngineConfig(device=device, dtype=dtype)
    target = settings.choose_device(config.device)
    kind = getattr(torch, config.dtype) if config.dtype else settings.choose_dtype(target)
    if model is None and shape is None and target.type == "cuda":
        shape = DEFAULT_SHAPE
    found = shapes.source(shape) if shape is not None else source.resolve(model or DEFAULT_MODEL)
    plan = (QUICK if quick else FULL).fitted(
        max_model_len=found.model_max_length, rounds=rounds, concurrency=concurrency
    )
    if target.type == "cuda":
        torch.cuda.set_device(target)
    measurement: Measurement | None = None
    try:
        with ProgressLine(sys.stderr) as progress:
            progress(0, 1, "weights")
            decoder = (
                shapes.random_decoder(found.config, dtype=kind, device=target)
                if shape is not None
                else registry.load(found, dtype=kind, device=target, progress=progress)
            )
            deadline = None if time_limit is None else started + time_limit
            rig = Rig(found, decoder, target, kind, plan, progress, deadline)
            measurement = Measurement(rig, None if out is None else Path(out))
            measurement.run(tuple(part for part in PARTS if part in parts))
    finally:  # also what an interrupted run has found
        if measurement is not None:
            print(measurement.report().markdown(), end="")
    if measurement.failed:
        raise NeperError(f"{', '.join(measurement.failed)} failed; the notes of the report say how")


@dataclass
class Measurement:
    """One run: what it has found so far, and where that is written.

    Attributes:
        took: seconds, by part.
        failed: parts that ended with an error.
    """

    rig: Rig
    out: Path | None
    took: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.found = Findings(self.rig.plan)

    def run(self, parts: tuple[str, ...]) -> None:
        """Run the parts in this order. One that fails is a note, and the next one gets a new engine."""
        measuring = Parts(self.rig, self.found, self.save)
        for part in parts:
            begun = time.perf_counter()
            try:
                measuring.run(part)
            except OutOfTime:
                self.found.notes.append(f"{part} was left out or cut short by the time limit")
            except KeyboardInterrupt:
                self.found.notes.append(f"the run was interrupted in {part}")
                self.save()
                raise
            except Exception as error:  # the minutes of the other parts must not be lost with it
                logger.exception("%s failed", part)
                first_line = (str(error).splitlines() or [""])[0]
                self.found.notes.append(f"{part} failed: {type(error).__name__}: {first_line}")
                self.failed.append(part)
                self.rig.drop_engine()
            self.took[part] = time.perf_counter() - begun
            self.save()
        if self.out is not None:
            note = engine_plot.save(self.found, self.out, self.stem, self.title)
            self.found.notes += [note] if note else []
            self.save()

    @property
    def title(self) -> str:
        return f"neper's engine on {self.rig.card}, {self.rig.source.name}"

    @property
    def stem(self) -> str:
        return f"engine-{slug(self.rig.card)}-{slug(self.rig.source.name)}"

    def save(self) -> None:
        """Write what was found so far, if there is a place for it."""
        if self.out is not None:
            self.report().save(self.out, self.stem)

    def report(self) -> EngineReport:
        rig = self.rig
        reference = "H200" in rig.card and rig.source.name == "qwen3-4b" and rig.dtype == torch.bfloat16
        return engine_report.report(self.title, self._setup(), self.found, reference=reference)

    def _setup(self) -> dict[str, Any]:
        rig, plan, copy = self.rig, self.rig.plan, self.found.copy
        setup: dict[str, Any] = {}
        random = ", random weights" if rig.source.name in shapes.SHAPES else ""
        setup["model"] = f"{rig.source.name}{random}, {str(rig.dtype).removeprefix('torch.')}"
        if rig.on_gpu:
            card = torch.cuda.get_device_properties(rig.device)
            setup["gpu"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB"
            setup["cuda"] = torch.version.cuda or f"HIP {torch.version.hip}"
        setup |= rig.backend_names
        if copy.samples:
            speed = 2 * plan.copy_bytes / copy.median / 1e6
            setup["copy"] = f"{speed:.2f} TB/s read and written, ±{copy.spread:.1%}"
        setup["requests"] = (
            f"{plan.prompt} random tokens in, {plan.reply} out; greedy, and sampled at temperature "
            f"{engine_cases.TEMPERATURE}, top_p {engine_cases.TOP_P}; no prefix cache"
        )
        setup["TPOT"] = (
            "from the first decode step's results to the last one's, a step; all requests of a batch start together"
        )
        setup["rounds"] = (
            f"{plan.rounds}, cases taking turns; / off: median of the rounds; A / A: half the range of off again / off"
        )
        setup["seconds"] = ", ".join(f"{part} {seconds:.0f}" for part, seconds in self.took.items()) or "0"
        return setup

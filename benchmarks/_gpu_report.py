"""What ``gpu.py`` found, as tables, as JSON and as a plot."""

from __future__ import annotations

import importlib.metadata
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from _gpu_checks import Check
from _gpu_machine import DRY_RUN, Machine, Roof
from _gpu_run import Result
from _gpu_setting import Case
from rich.table import Table

import dsafx

_LIBRARIES = ("triton", "transformers", "flashinfer-python", "deep_gemm", "flash_mla")
_TITLE = "Kernels of {provider} against the fastest peer, and against the device itself"


@dataclass(frozen=True)
class Run:
    """Everything that one command found.

    left: cases that the budget of ``budget`` seconds had no room for.
    """

    machine: Machine
    roof: Roof
    checks: Sequence[Check]
    results: Sequence[Result]
    left: Sequence[Case]
    budget: float
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether nothing failed and no result was wrong."""
        return all(check.outcome != "failed" for check in self.checks) and all(
            result.status.name not in ("FAILED", "WRONG") for result in self.results
        )


def check_table(checks: Sequence[Check]) -> Table:
    """One row a check."""
    shown = Table(title="Checks on the device")
    for heading in ("check", "outcome", "detail"):
        shown.add_column(heading, overflow="fold")
    for check in checks:
        shown.add_row(check.name, check.outcome, check.detail)
    return shown


def table(run: Run) -> Table:
    """One row a case; ratios are medians of interleaved pairs, with the lowest and the highest."""
    title = _TITLE.format(provider=run.machine.provider)
    shown = Table(title=f"{title}\n{DRY_RUN}" if run.machine.dry else title)
    for heading in ("case", "times faster", "than", "of the roofline", "of bf16 GEMM", "of copy"):
        shown.add_column(heading, overflow="fold")
    for result in run.results:
        best = result.best
        shown.add_row(
            str(result.case),
            str(best.speedup) if best is not None else result.status.value,
            best.name if best is not None else "",
            "" if result.share_of_roof is None else str(result.share_of_roof),
            _share(result.of_bf16_gemm),
            _share(result.of_copy),
        )
    return shown


def remarks(result: Result) -> str:
    """What else is to be said about a result, in one line."""
    parts = [] if result.status.name == "MEASURED" else [result.status.value]
    parts += [result.reason] if result.reason else []
    for peer in result.peers:
        said = f"not run, {peer.reason}" if peer.speedup is None else f"{peer.speedup} times faster"
        if peer.difference is not None:
            said += f", difference {peer.difference:.1e}"
        parts.append(f"{peer.name}: {said}")
    if result.tflops:
        parts.append(f"{result.tflops:.3g} TFLOP/s")
    if result.of_fp8_gemm:
        parts.append(f"{result.of_fp8_gemm:.0%} of the fp8 GEMM rate")
    if result.extra_bytes is not None:
        parts.append(f"{result.extra_bytes / 2**20:.1f} MiB over its inputs")
    return f"{result.case} ({result.provider}, {result.rounds} rounds): {'; '.join(parts)}"


def settings(run: Run) -> str:
    """On what was measured, and how, in one line."""
    if run.machine.dry:
        return DRY_RUN
    fp8 = "none" if run.roof.fp8 is None else f"{run.roof.fp8 * 1e-12:.4g} TFLOP/s"
    return (
        f"{run.machine.name}, provider {run.machine.provider}: bf16 GEMM"
        f" {run.roof.bf16 * 1e-12:.4g} TFLOP/s, fp8 GEMM {fp8}, copy"
        f" {run.roof.copy * 1e-12:.3g} TB/s; CUDA events, L2 flushed before each call, launches"
        " enqueued before it starts"
    )


def as_json(run: Run) -> str:
    """Everything that was found, and on what."""
    content: dict[str, Any] = {
        "dry_run": run.machine.dry,
        "note": settings(run),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": run.machine.name,
        "provider": run.machine.provider,
        "versions": versions(),
        "rules": {
            "pairs": run.machine.rules.pairs,
            "drift": None if run.machine.dry else run.machine.rules.drift,
            "clock": "wall clock" if run.machine.dry else "CUDA events",
            "l2": "not flushed" if run.machine.dry else "flushed before each call",
        },
        "budget_seconds": run.budget,
        "seconds": round(run.seconds, 1),
        "roofline": asdict(run.roof),
        "ok": run.ok,
        "checks": [asdict(check) for check in run.checks],
        "results": [
            asdict(result) | {"best_peer": None if result.best is None else result.best.name}
            for result in run.results
        ],
        "not_run": [asdict(case) for case in run.left],
    }
    return json.dumps(content, indent=2) + "\n"


def versions() -> dict[str, str | None]:
    """Of what ran; None where a library is not installed."""
    found: dict[str, str | None] = {
        "dsafx": dsafx.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def plot(run: Run, path: Path) -> None:
    """Bars of the speedups over the fastest peers, and of the shares of the roofline.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    shown = [result for result in run.results if result.share_of_roof is not None]
    figure = Figure(figsize=(14, 1.6 + 0.28 * len(shown)), layout="constrained")
    figure.suptitle(DRY_RUN if run.machine.dry else run.machine.name)
    left, right = figure.subplots(1, 2, sharey=True)
    for row, result in enumerate(shown):
        best, share = result.best, result.share_of_roof
        if best is not None and best.speedup is not None:
            spread = best.speedup
            reach = [[spread.median - spread.low], [spread.high - spread.median]]
            left.barh(row, spread.median, xerr=reach, capsize=2, color="tab:blue")
        if share is not None:
            right.barh(row, share.median, color="tab:orange")
    left.set_yticks(range(len(shown)), [str(result.case) for result in shown])
    left.margins(y=0.01)
    left.invert_yaxis()
    left.axvline(1.0, color="black", linewidth=0.8)
    left.set_xscale("log")
    left.set_xlabel("times faster than the fastest peer")
    right.set_xlabel("share of the roofline of this run")
    figure.savefig(path)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"

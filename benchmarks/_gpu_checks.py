"""What must hold on the device before anything is timed: right results, dead kernels, no waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from _gpu_machine import Machine
from _gpu_run import line
from _gpu_setting import Case, Family, Scene
from _gpu_step import Prompt, decode_step
from _measure import Call
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from dsafx import conformance, ops
from dsafx.ops import _self_test, providers

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
_INDEXER = ("index_query", "index_scores", "index_select", "select_topk", "index_select_paged")
_SIZE = "small"
# Every so many-th case of the kit, where it only has to be seen that it runs.
_DRY_STEP = 16


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. outcome: "passed", "failed" or "not run"."""

    name: str
    outcome: str
    detail: str


def checks(machine: Machine, budget: float) -> Iterator[Check]:
    """All checks; the conformance kit, which comes last, has what is left of ``budget`` seconds."""
    end = time.monotonic() + budget
    yield from self_tests(machine)
    for name, check in (
        ("dead selection", dead_selection),
        ("captured decode step", captured_decode),
    ):
        yield _seen(name, check, machine)
    yield kit(machine, end)


def _seen(name: str, check: Callable[[Machine], Check], machine: Machine) -> Check:
    """What ``check`` says; whatever it raises is a failure, and others still run."""
    try:
        with torch.no_grad(), ops.use_provider(machine.provider):
            return check(machine)
    except Exception as error:
        return Check(name, FAILED, line(error))


def self_tests(machine: Machine) -> Iterator[Check]:
    """Each provider that runs here, op by op against the reference."""
    for provider in providers.PROVIDERS:
        if provider.module is None:
            continue
        name = f"self-test of {provider.name}"
        reason = provider.supports(machine.device.type)
        if reason is not None:
            yield Check(name, NOT_RUN, reason)
            continue
        # A dry run has no time for a C++ compiler.
        with ops.options(compiled_kernels=not machine.dry):
            found = _self_test.verdict(provider, machine.device)
        untried = ", ".join(f"{op} ({why})" for op, why in found.untested.items())
        detail = f"{found}; not tried: {untried}" if untried else str(found)
        yield Check(name, PASSED if found.passed else FAILED, detail)


def kit(machine: Machine, end: float) -> Check:
    """As many cases of the conformance kit as there is time for until ``end``."""
    name = f"conformance kit, {machine.provider}"
    adapters = conformance.adapters_for(machine.provider)
    cases = conformance.CASES[:: _DRY_STEP if machine.dry else 1]
    passed, skipped, failed, left = 0, 0, [], 0
    for case in cases:
        if time.monotonic() > end:
            left += 1
            continue
        report = conformance.run(adapters, _SIZE, [case])
        passed += len(report.passed)
        skipped += len(report.skipped)
        failed += [f"{case.name}: {result.reason}" for result in report.failed]
    detail = f"size {_SIZE}: {passed} passed, {skipped} skipped, {left} not run"
    if not passed and not failed:
        return Check(name, NOT_RUN, detail)
    return Check(name, FAILED if failed else PASSED, "; ".join([detail, *failed]))


@dataclass(frozen=True)
class Launched:
    """What a call launches.

    kernels: on the device. ours: ops of this package. shapes: of all operators' inputs.
    """

    kernels: tuple[str, ...]
    ours: frozenset[str]
    shapes: tuple[list[int], ...]


def launched(call: Call, machine: Machine) -> Launched:
    """Run ``call``, warmed up, under the profiler."""
    call()
    machine.synchronize()
    activities = [ProfilerActivity.CPU]
    if machine.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as seen:
        call()
        machine.synchronize()
    events = seen.events() or []
    return Launched(
        tuple(event.name for event in events if event.device_type == DeviceType.CUDA),
        frozenset(
            event.name.removeprefix("dsafx::")
            for event in events
            if event.name.startswith("dsafx::")
        ),
        tuple(shape for event in events for shape in event.input_shapes),
    )


def dead_selection(machine: Machine) -> Check:
    """A prompt of K / 2 tokens launches nothing of the indexer but the key and its write."""
    long = _prompt(machine, 4096)
    scoring = launched(long, machine)
    scored_by = _indexer_kernels(machine)
    said = []
    subjects = ["as it is"] if machine.dry else ["as it is", "compiled"]
    for subject in subjects:
        short = _prompt(machine, 1024)
        if subject == "compiled":
            short.run = torch.compile(short.layer, backend="dsafx", dynamic=False)
        found = launched(short, machine)
        wrong = sorted(found.ours.intersection(_INDEXER))
        wrong += sorted(scored_by.intersection(found.kernels))
        if short.projection in found.shapes:
            wrong.append("the projection of the indexer's query")
        if not short.written:
            wrong.append("no index key, which must be written")
        if wrong:
            detail = f"{subject}, a short prompt launches {', '.join(wrong)}"
            return Check("dead selection", FAILED, detail)
        count = "" if machine.dry else f"{len(found.kernels)} kernels, "
        said.append(f"{subject} {count}none of the indexer's, keys written")
    seen = long.projection in scoring.shapes and "index_select" in scoring.ours
    # Names that nobody launches would be found in no prompt, short or long.
    if not seen or not (machine.dry or scored_by.intersection(scoring.kernels)):
        return Check("dead selection", FAILED, "a long prompt was not seen to score")
    if not machine.dry:
        said.append(f"a prompt of 2 K {len(scoring.kernels)} kernels")
    return Check("dead selection", PASSED, "short prompt " + "; ".join(said))


def _prompt(machine: Machine, tokens: int) -> Prompt:
    # DeepSeek-V3.2: at tiny dimensions too, no other weight has the shape of its index query's.
    return Prompt(Scene(machine, Case("layer", Family.DEEPSEEK, tokens, tokens)))


def _indexer_kernels(machine: Machine) -> frozenset[str]:
    """Names of this package's kernels that scoring and selection alone launch."""
    scene = Scene(machine, Case("index_select", Family.DEEPSEEK, 4096, 4096))
    q, k, weights = scene.index_operands
    ks, ke = scene.interval
    topk = scene.dims.index_topk
    found = launched(lambda: ops.index_select(q, k, weights, ks, ke, scene.keys, topk), machine)
    others = ("at::", "Memset", "Memcpy")
    return frozenset(name for name in found.kernels if not any(x in name for x in others))


def captured_decode(machine: Machine) -> Check:
    """A decode step waits for nothing, and its CUDA graph gives what it gives."""
    name = "captured decode step"
    # Lengths of a dry run are a 64th.
    requests = 512 if machine.dry else 8
    step = decode_step(Scene(machine, Case("decode", Family.DEEPSEEK, requests, 8192, requests)))
    eager = step()
    if machine.device.type != "cuda":
        same = torch.equal(step(), eager)
        detail = "needs CUDA; the step gives the same twice" if same else "two steps differ"
        return Check(name, NOT_RUN if same else FAILED, detail)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    machine.synchronize()
    graph = torch.cuda.CUDAGraph()
    with _no_waits():
        step()
    with torch.cuda.graph(graph), _no_waits():
        out = step()
    with _no_waits():
        graph.replay()
    machine.synchronize()
    if not torch.equal(out, eager):
        return Check(name, FAILED, "the replay of its graph gives other values")
    return Check(name, PASSED, "no wait for the device; the replay is bit-equal")


@contextmanager
def _no_waits() -> Iterator[None]:
    """Any wait of the host for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")

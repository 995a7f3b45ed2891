"""The passes in order, as the two objects that Inductor's hooks run."""

from __future__ import annotations

import hashlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import fx

from ..ops import _options, libraries, providers
from . import _torch_compat as compat
from ._edit import copy_of, is_ours, restore
from ._log import follow_environment, following, tell
from ._oracles import following_hints, legality
from ._print import graph_text
from ._report import PassContext, PassOptions, PassReport, PipelineReport, collected
from .close_selection import close_selection_pass
from .fuse_cache_write import fuse_cache_write_pass
from .fuse_index_query import fuse_index_query_pass
from .fuse_norm_rope import fuse_norm_rope_pass
from .lower import lower_pass
from .recognise import recognise_pass
from .resolve_route import resolve_route_pass
from .verify import Entered, VerificationError, verify_pass, warn_once

Pass = Callable[[fx.Graph, PassContext], PassReport]

PASSES: tuple[Pass, ...] = (
    resolve_route_pass,
    close_selection_pass,
    fuse_norm_rope_pass,
    fuse_index_query_pass,
    fuse_cache_write_pass,
    lower_pass,
    verify_pass,
)

_FLOORS = ("dsafx", "dsafx.ops", "dsafx.fusion", "dsafx.passes", "dsafx.models")


class Pipeline(compat.InferenceAwarePass):
    """All passes over one post-grad graph.

    | order | pass | does |
    |---|---|---|
    | 1 | ``resolve_route`` | routed attention becomes the kernels of its route |
    | 2 | ``close_selection`` | short rows are not scored; an unread selection goes |
    | 3 | ``fuse_norm_rope`` | norms and rotations of one layer become one op |
    | 4 | ``fuse_index_query`` | rotation, quantisation and scales of an index query become one op |
    | 5 | ``fuse_cache_write`` | norms and rotations write the paged caches themselves |
    | 6 | ``lower`` | what is left of the semantic ops becomes ATen |
    | 7 | ``verify`` | proves that writes, outputs, selections and routes are as they must be |
    """

    def __init__(self, options: PassOptions, passes: tuple[Pass, ...] = PASSES) -> None:
        follow_environment()
        self.options = options
        self.passes = passes

    def __call__(self, graph: fx.Graph, is_inference: bool) -> None:  # type: ignore[override]
        """Rewrite ``graph`` in place; a graph without an op of this package is left at once.

        Raises:
            VerificationError: the result cannot be verified and ``strict`` is set.
        """
        if not any(is_ours(node) for node in graph.nodes):
            tell(PipelineReport(inference=is_inference))
            return
        reports = collected()
        report = PipelineReport(inference=is_inference)
        if reports is not None:
            reports.append(report)
            report.before = graph_text(graph)
        saved = copy_of(graph)
        context = self._context(graph, is_inference)
        with following(graph, report) as steps:
            for each in self.passes:
                report.passes.append(each(graph, context))
                steps.after(report.passes[-1].name)
            self._settle(graph, saved, report)
            steps.after("put_back")
        if reports is not None:
            report.after = graph_text(graph)

    def _context(self, graph: fx.Graph, is_inference: bool) -> PassContext:
        live = self.options.specialize == "auto" and compat.guards_are_live(graph)
        return PassContext(
            options=self.options,
            inference=is_inference,
            guards_live=live,
            le=legality(self.options.specialize, live),
            prefer=following_hints,
            entered=Entered.of(graph),
        )

    def _settle(self, graph: fx.Graph, saved: fx.Graph, report: PipelineReport) -> None:
        """Keep the result, or put the graph back as it came where it cannot be verified."""
        problems = report.of("verify").declined
        if not problems:
            graph.lint()
            return
        report.problem = "; ".join(f"{name} {reason}" for name, reason in problems)
        if self.options.strict:
            raise VerificationError(report.problem)
        warn_once(report.problem)
        restore(graph, saved)

    def uuid(self) -> str:
        """A digest of everything that the compiled result depends on (contract C20)."""
        return _digest(self.options, self.passes)


class Recogniser(compat.GraphPass):
    """``recognise`` over one Dynamo graph, before AOTAutograd has seen it."""

    def __init__(self, options: PassOptions) -> None:
        self.options = options

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite ``graph`` in place; one without a DSA layer of transformers is left at once."""
        if self.options.recognise == "never":
            return
        reports = collected()
        report = PipelineReport(inference=None, stage="pre_grad")
        if reports is not None:
            report.before = graph_text(graph)
        with following(graph, report) as steps:
            report.passes.append(recognise_pass(graph))
            steps.after("recognise")
        graph.lint()
        found = report.passes[-1]
        if reports is not None and (found.matched or found.declined):
            report.after = graph_text(graph)
            reports.append(report)
        if found.declined and not found.matched:
            _warn_once(*found.declined[0])

    def uuid(self) -> str:
        """A digest of everything that the compiled result depends on (contract C20)."""
        return _digest(self.options, (recognise_pass,))


@lru_cache(maxsize=1)
def _warn_once(layer: str, reason: str) -> None:
    warnings.warn(
        f"no DSA layer of the model was recognised, so it compiles as under Inductor ({layer}:"
        f" {reason}); call dsafx.enable(model) before torch.compile, or dsafx.compile(model)",
        stacklevel=2,
    )


def _digest(options: PassOptions, passes: Sequence[Callable[..., PassReport]]) -> str:
    parts = (
        source_digest(),
        torch.__version__,
        repr(options),
        repr([each.__name__ for each in passes]),
        repr(_options.current()),
        repr([(device, _dispatched(device)) for device in ("cpu", "cuda")]),
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _dispatched(device_type: str) -> dict[str, object]:
    """What decides which kernels calls on ``device_type`` get."""
    found: dict[str, object] = dict(providers.reasons(device_type))
    for provider in providers.PROVIDERS:
        if found[provider.name] is None:
            # The order of a set differs between processes.
            found[provider.name] = {**vars(provider), "fused": sorted(provider.fused)}
            if provider.library is not None:
                found[provider.library] = libraries.version(provider.library)
    return found


@lru_cache(maxsize=1)
def source_digest() -> str:
    """A digest of the source files of the whole package, read once a process."""
    digest = hashlib.sha256()
    for floor in _FLOORS:
        spec = importlib.util.find_spec(floor)
        assert spec is not None, f"{floor} is part of this package"
        for folder in spec.submodule_search_locations or ():
            sources = [*Path(folder).rglob("*.py"), *Path(folder).rglob("*.cpp")]
            for path in sorted(sources):
                digest.update(f"{floor}/{path.relative_to(folder).as_posix()}\n".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()

"""Prove on the final graph that the rewrites kept what they had no right to touch."""

from __future__ import annotations

import warnings

from torch import fx

from ._report import PassContext, PassReport
from ._verify_entered import Entered, Final
from ._verify_routes import index_operands, misplaced_selections, routed_ops
from ._verify_wiring import changed_outputs, foreign_operands, misread_operands
from ._verify_writes import added_writes, late_reads, lost_writes

__all__ = ["Entered", "VerificationError", "verify_pass", "warn_once"]


class VerificationError(RuntimeError):
    """A rewritten graph does not keep what the contract promises; nothing was compiled from it."""


def verify_pass(graph: fx.Graph, context: PassContext) -> PassReport:
    """Check the final graph; whatever cannot be proved is declined with the reason.

    A pass says by ``replace`` which new node gives the value of which old one, and its word is
    taken for that and for nothing else. Invariants, against the graph as it entered:

    - A node that is still there reads what it read, or what stands for it; so do the outputs.
    - A new node reads nothing that the nodes it stands for did not depend on.
    - Every write is still there, or moved into a fused op that writes the same rows to the same
      slots of the same cache; nothing else is written, and no old value is read later than before.
    - A selection is still there, or its closed form is, or nobody reads it and no gradient can be
      asked. Every index operand is a selection or an int32 graph input that nothing writes.
    - Each routed op is there, or exactly one kernel in its place that reads its selection; a dense
      kernel is known, or checks at run time, to see no more keys than the routing contract allows.
    """
    report = PassReport("verify", verb="proved")
    if context.entered is None:
        raise ValueError("verify needs the snapshot of the graph as it entered: context.entered")
    final = Final(graph, context.entered)
    proved = [
        *index_operands(final),
        *lost_writes(final),
        *((graph.output_node(), problem) for problem in changed_outputs(final)),
        *routed_ops(final, context),
    ]
    refused = [
        *misread_operands(final),
        *foreign_operands(final),
        *added_writes(final),
        *late_reads(final),
        *misplaced_selections(final, context),
    ]
    for node, problem in (*proved, *refused):
        if problem is None:
            report.matched += 1
        else:
            report.decline(node, problem)
    return report


_warned: set[str] = set()


def warn_once(problem: str) -> None:
    """Say that a graph is compiled as it came; once in a process for each problem."""
    if problem not in _warned:
        _warned.add(problem)
        warnings.warn(
            f"dsafx could not verify its rewrites and compiles the graph as it came: {problem}",
            stacklevel=4,
        )

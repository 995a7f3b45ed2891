"""FX passes over post-grad graphs: resolve routes, close selections, fuse and lower ops."""

from __future__ import annotations

from ._print import graph_text
from ._report import PassReport, PipelineReport, collect

__all__ = ["PassReport", "PipelineReport", "collect", "graph_text"]

"""Small graphs to try passes on: traced without a compiler, or compiled and reported."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import fresh_cache
from torch.fx.experimental.proxy_tensor import make_fx

from dsafx import ops, routing
from dsafx.passes import PipelineReport, collect, graph_text
from dsafx.passes._oracles import following_hints, guarding, static
from dsafx.passes._report import PassContext, PassOptions, PassReport
from dsafx.passes.pipeline import Pipeline
from dsafx.passes.verify import Entered

HEADS, NOPE, ROPE, VALUE, LATENT = 2, 8, 4, 8, 32
INDEX_HEADS, INDEX_DIM, TOPK, HIDDEN, Q_LATENT = 8, 16, 16, 24, 20
SCALE = (NOPE + ROPE) ** -0.5


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def spec_of(mode: str = "auto", dense: bool = True, masked: bool = True, **config: Any) -> str:
    """The spec string of a layer that declares dense and masked MHA unless told otherwise."""
    layer = routing.LayerCapabilities(dense_mha=dense, masked_mha=masked)
    return routing.encode_spec(layer, routing.RouteConfig(mode=mode, **config))


def trace(function: Callable[..., Any], *args: Any, symbolic: bool = False) -> fx.Graph:
    """The ATen graph of ``function`` on fake values; ``symbolic`` makes sizes and ints symbols."""

    def run(*values: Any) -> Any:
        return function(*values)

    mode = "symbolic" if symbolic else "fake"
    with torch.no_grad():
        return make_fx(run, decomposition_table=select_decomp_table(), tracing_mode=mode)(
            *args
        ).graph


def static_context(graph: fx.Graph | None = None, **changes: Any) -> PassContext:
    """A context that knows constants and ranges only, as where nobody checks guards."""
    return _context(
        graph, {"le": static, "prefer": following_hints, "guards_live": False, **changes}
    )


def guarding_context(graph: fx.Graph | None = None, **changes: Any) -> PassContext:
    """A context as in an ordinary compile, where a guard may settle a length."""
    return _context(graph, {"le": guarding, "prefer": following_hints, **changes})


def _context(graph: fx.Graph | None, settings: dict[str, Any]) -> PassContext:
    return PassContext(entered=None if graph is None else Entered.of(graph), **settings)


def text(graph: fx.Graph, report: PassReport | None = None) -> str:
    """The calls of ``graph``, a line each, and the report."""
    graph.lint()
    lines = graph_text(graph, ends=False).splitlines() + ([] if report is None else [str(report)])
    return "\n".join(wrapped(line) for line in lines)


def wrapped(line: str) -> str:
    """A line of a snapshot, broken where it is longer than a line of code may be."""
    return textwrap.fill(
        line, 94, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )


def op_names(graph: fx.Graph) -> list[str]:
    """Names of this package's ops in ``graph``, in order."""
    targets = [node.target for node in graph.nodes if node.op == "call_function"]
    return [
        target._opname
        for target in targets
        if isinstance(target, torch._ops.OpOverload) and target.namespace == "dsafx"
    ]


def compiled(
    function: Callable[..., Any],
    *calls: tuple[Any, ...],
    dynamic: bool | None = None,
    **options: Any,
) -> tuple[list[Any], list[PipelineReport]]:
    """Results of ``function``, compiled with backend ``dsafx``, for each of ``calls``; reports."""
    torch._dynamo.reset()
    with fresh_cache(), collect() as reports:
        run = torch.compile(
            function, backend="dsafx", fullgraph=True, dynamic=dynamic, options=options
        )
        results = [run(*args) for args in calls]
    return results, reports


def run_pipeline(graph: fx.Graph, **options: Any) -> PipelineReport:
    """The pipeline on a traced graph, as for inference outside of a compile."""
    with collect() as reports:
        Pipeline(PassOptions(**options))(graph, True)
    graph.lint()
    return reports[0]


class Layer(torch.nn.Module):
    """One attention layer with its indexer, in semantic ops, for one request without a prefix."""

    def __init__(self, spec: str | None = None) -> None:
        super().__init__()
        self.spec = spec_of() if spec is None else spec
        shapes = {
            "q_a": (Q_LATENT, HIDDEN),
            "kv_a": (LATENT + ROPE, HIDDEN),
            "q_b": (HEADS * (NOPE + ROPE), Q_LATENT),
            "kv_b": (HEADS * (NOPE + VALUE), LATENT),
            "index_k": (INDEX_DIM, HIDDEN),
            "index_q": (INDEX_HEADS * INDEX_DIM, Q_LATENT),
            "index_w": (INDEX_HEADS, HIDDEN),
        }
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            weight = 0.3 * torch.randn(shape, generator=generator)
            self.register_parameter(name, torch.nn.Parameter(weight))
        for name, size in {"q_norm": Q_LATENT, "kv_norm": LATENT, "k_norm": INDEX_DIM}.items():
            weight = 0.5 + torch.rand(size, generator=generator)
            self.register_parameter(name, torch.nn.Parameter(weight))
        self.k_bias = torch.nn.Parameter(torch.randn(INDEX_DIM, generator=generator))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, ks: Tensor, ke: Tensor) -> Any:
        """The layer's output and its new index keys, which stand for the write to a cache."""
        q_c = ops.rms_norm(x @ self.q_a.t(), self.q_norm, 1e-6)
        latents = x @ self.kv_a.t()
        kv_c = ops.rms_norm(latents[:, :LATENT], self.kv_norm, 1e-6)
        k_pe = ops.rope(latents[:, LATENT:], cos, sin, "interleaved")
        normed = ops.layer_norm(x @ self.index_k.t(), self.k_norm, self.k_bias, 1e-6)
        rotated = ops.rope(normed[:, :ROPE], cos, sin, "half")
        index_key = torch.cat([rotated, normed[:, ROPE:]], dim=-1)
        indices = self.select(x, q_c, index_key, cos, sin, ks, ke)
        out = self.attend(q_c, kv_c, k_pe, cos, sin, indices, ks, ke)
        return out, index_key

    def select(
        self,
        x: Tensor,
        q_c: Tensor,
        key: Tensor,
        cos: Tensor,
        sin: Tensor,
        ks: Tensor,
        ke: Tensor,
    ) -> Tensor:
        q = (q_c @ self.index_q.t()).view(-1, INDEX_HEADS, INDEX_DIM)
        q = torch.cat([ops.rope(q[..., :ROPE], cos, sin, "half"), q[..., ROPE:]], dim=-1)
        weights = (x @ self.index_w.t()).float() * (INDEX_HEADS * INDEX_DIM) ** -0.5
        return ops.index_select(q, key, weights, ks, ke, key.shape[0], TOPK)

    def attend(
        self,
        q_c: Tensor,
        kv_c: Tensor,
        k_pe: Tensor,
        cos: Tensor,
        sin: Tensor,
        indices: Tensor,
        ks: Tensor,
        ke: Tensor,
    ) -> Tensor:
        q = (q_c @ self.q_b.t()).view(-1, HEADS, NOPE + ROPE)
        q_pe = ops.rope(q[..., NOPE:], cos, sin, "interleaved")
        length = kv_c.shape[0]
        out, _ = ops.mla_attention(
            q[..., :NOPE],
            q_pe,
            kv_c,
            k_pe,
            self.kv_b,
            indices,
            ks,
            ke,
            length,
            q.shape[0],
            TOPK,
            SCALE,
            self.spec,
        )
        return out


def prompt(length: int) -> tuple[Tensor, ...]:
    """Inputs of ``Layer`` for one request of ``length`` tokens."""
    angle = torch.randn(length, ROPE // 2)
    ke = torch.arange(1, length + 1, dtype=torch.int32)
    return torch.randn(length, HIDDEN), angle.cos(), angle.sin(), torch.zeros_like(ke), ke


def largest_difference(ours: Any, theirs: Any) -> float:
    """Over all pairs of two lists of tensors."""
    pairs = zip(ours, theirs, strict=True)
    return max(float((a - b).abs().max()) for a, b in pairs)


def trace_layer(length: int, symbolic: bool = False, spec: str | None = None) -> fx.Graph:
    """The graph of ``Layer`` on a prompt, parameters as constants of the module."""
    layer = Layer(spec)
    names = [name for name, _ in layer.named_parameters()]

    def run(weights: list[Tensor], *inputs: Tensor) -> Any:
        return torch.func.functional_call(layer, dict(zip(names, weights, strict=True)), inputs)

    return trace(run, [p.detach() for p in layer.parameters()], *prompt(length), symbolic=symbolic)


def node_named(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def evaluate(graph: fx.Graph, *args: Any) -> Any:
    """Run a graph that has no constants."""
    return fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph)).run(*args)

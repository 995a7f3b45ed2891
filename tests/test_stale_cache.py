"""Two processes that share a compile cache never reuse a graph that the other one's code made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dsafx

CHILD = """
import json
import sys

import torch
from torch._dynamo.utils import counters

from dsafx import ops, routing
from dsafx.passes import collect

options, lengths = json.loads(sys.argv[1]), json.loads(sys.argv[2])
layer = routing.LayerCapabilities(dense_mha=True, masked_mha=True)
spec = routing.encode_spec(layer, routing.RouteConfig())
topk = 4


def step(index, heads, latent, k_pe, weight, ke):
    tokens = latent.shape[0]
    ks = torch.zeros_like(ke)
    kv_c = ops.rms_norm(latent, torch.ones(16), 1e-6)
    indices = ops.index_select(*index, ks, ke, tokens, topk)
    out, _ = ops.mla_attention(
        *heads, kv_c, k_pe, weight, indices, ks, ke, tokens, tokens, topk, 0.3, spec
    )
    return kv_c, indices, out


def inputs(tokens):
    torch.manual_seed(0)
    index = torch.randn(tokens, 2, 8), torch.randn(tokens, 8), torch.randn(tokens, 2)
    heads = torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 4)
    ke = torch.arange(1, tokens + 1, dtype=torch.int32)
    rest = torch.randn(tokens, 16), torch.randn(tokens, 4), torch.randn(32, 16), ke
    return index, heads, *rest


compiled = torch.compile(step, backend="dsafx", dynamic=len(lengths) > 1, options=options)
equal = []
with torch.no_grad(), collect() as reports:
    for tokens in lengths:
        args = inputs(tokens)
        results = list(zip(compiled(*args), step(*args)))
        equal += [bool(torch.allclose(a, b, atol=1e-5)) for a, b in results]
kernels = ("dense_mha", "masked_mha", "sparse_mla")
print(json.dumps({
    "hits": counters["inductor"]["fxgraph_cache_hit"],
    "misses": counters["inductor"]["fxgraph_cache_miss"],
    "right": all(equal),
    "norm": float(results[0][0].square().mean()),
    "kernels": [k for r in reports for k in kernels if f".{k}(" in r.after],
}))
"""

# One source file each: what changes, and what becomes of it.
CHANGES = {
    "the fake of an op": (
        "ops/index_select.py",
        "    return ks.new_empty((q.shape[0], topk))",
        "    return ks.new_empty((q.shape[0], topk)).to(ks.dtype)",
    ),
    "an inlined reference body": (
        "ops/norm.py",
        "torch.rsqrt(",
        "2 * torch.rsqrt(",
    ),
    "a routing constant": (
        "ops/_cost.py",
        "REFERENCE_COSTS = CostConstants()",
        "REFERENCE_COSTS = CostConstants(version=2, masked=1000)",
    ),
}


class Tree:
    """A copy of the installed package that a child process imports in place of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "child.py"
        self.script.write_text(CHILD)
        package = folder / "dsafx"
        shutil.copytree(Path(dsafx.__file__).parent, package, ignore=_ignored)
        for floor in ("ops", "passes", "fusion", "models"):
            if not (package / floor).exists():
                shutil.copytree(Path(dsafx.__file__).parents[1] / floor, package / floor)

    def change(self, path: str, old: str, new: str) -> None:
        source = self.folder / "dsafx" / path
        text = source.read_text()
        assert old in text
        source.write_text(text.replace(old, new))

    def run(self, *lengths: int, **options: Any) -> dict[str, Any]:
        """What a process finds that compiles the step and runs it at ``lengths`` (default 6)."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "cache"),
        }
        done = subprocess.run(
            [sys.executable, str(self.script), json.dumps(options), json.dumps(lengths or (6,))],
            env=environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


def _ignored(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__"]


@pytest.mark.slow
def test_a_graph_is_reused_only_where_nothing_that_made_it_has_changed(tmp_path: Path):
    tree = Tree(tmp_path)
    first = tree.run()
    assert (first["hits"], first["misses"]) == (0, 1)
    assert first["right"]
    assert first["kernels"] == ["masked_mha"]
    assert tree.run()["hits"] == 1

    assert tree.run(fuse="always")["misses"] == 1
    assert tree.run(specialize="never")["misses"] == 1
    for what, change in CHANGES.items():
        tree.change(*change)
        changed = tree.run()
        assert (changed["hits"], changed["misses"]) == (0, 1), what
        assert changed["right"], what
    # The last run has all changes: the doubled norm and the other kernel are in the compiled code.
    assert changed["norm"] == pytest.approx(4 * first["norm"], rel=1e-3)
    assert changed["kernels"] == ["sparse_mla"]


@pytest.mark.slow
def test_a_second_process_finds_both_variants_in_the_cache_and_is_right_in_any_order(
    tmp_path: Path,
):
    tree = Tree(tmp_path)
    cold = tree.run(3, 9, 4)
    assert (cold["hits"], cold["misses"], cold["right"]) == (0, 2, True)
    assert cold["kernels"] == ["dense_mha", "sparse_mla"]
    warm = tree.run(3, 9, 4)
    assert (warm["hits"], warm["misses"], warm["right"]) == (2, 0, True)
    # No pass has run, and the graphs' premises are still checked.
    assert warm["kernels"] == []
    assert tree.run(9, 3, 12)["right"]

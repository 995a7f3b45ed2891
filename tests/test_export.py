"""Compiled code that outlives its process: export, AOTInductor, aot_compile and saved caches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from _graphs import Layer, largest_difference, op_names, prompt, run_pipeline
from _select import LONG, SHORT, SHORT_TOO, TOPK, Select, check, tokens
from torch import fx
from torch._inductor.utils import fresh_cache

import dsafx
from dsafx.passes import _torch_compat as compat
from dsafx.passes import collect

HERE = Path(__file__).parent
LENGTHS = (SHORT, TOPK, TOPK + 1, LONG)


def exported(layer: Layer, length: int) -> torch.export.ExportedProgram:
    """``layer`` for any number of tokens, traced at ``length``."""
    many = torch.export.Dim("tokens", min=2, max=4096)
    return torch.export.export(
        layer, prompt(length), dynamic_shapes=tuple({0: many} for _ in range(5))
    )


@torch.no_grad()
@pytest.mark.parametrize("length", [SHORT, LONG])
def test_an_exported_program_keeps_our_ops_and_no_pass_specialises_it(length: int):
    layer = Layer().eval()
    program = exported(layer, length)
    for tokens_now in LENGTHS:
        args = prompt(tokens_now)
        assert largest_difference(program.module()(*args), layer(*args)) == 0
    graph = program.run_decompositions().graph_module.graph
    assert not compat.guards_are_live(graph)
    report = run_pipeline(graph)
    assert op_names(graph) == ["index_select", "mla_attention"]
    ((_, reason),) = report.of("resolve_route").declined
    assert reason.startswith("decides at run time")
    assert report.of("close_selection").declined == [
        ("index_select", "rows may see more than K keys")
    ]


LOADER = """
import sys
import torch

layer_inputs = torch.load(sys.argv[2])
if sys.argv[3]:
    __import__(sys.argv[3])
run = torch._inductor.aoti_load_package(sys.argv[1])
torch.save([run(*args) for args in layer_inputs], sys.argv[2])
"""


def load_elsewhere(package: str, inputs: Path, imports: str) -> subprocess.CompletedProcess[str]:
    """Run a package in a new Python process, which replaces the inputs by the results."""
    command = [sys.executable, "-c", LOADER, package, str(inputs), imports]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("first", [SHORT, LONG])
def test_a_package_is_right_at_any_length_in_a_process_that_imports_the_ops(
    first: int, tmp_path: Path
):
    layer, live = Layer().eval(), []

    def probe(graph: fx.Graph) -> None:
        live.append(compat.guards_are_live(graph))

    with fresh_cache(), collect() as reports:
        package = torch._inductor.aoti_compile_and_package(
            exported(layer, first),
            package_path=str(tmp_path / "layer.pt2"),
            inductor_configs=dsafx.inductor_options(
                strict=True, specialize="auto", post_grad_custom_pre_pass=probe
            ),
        )
    assert live == [False]
    (report,) = (report for report in reports if "dsafx." in report.after)
    for kept in ("mla_attention", "index_select"):
        assert report.after.count(f"dsafx.{kept}(") == 1

    calls = [prompt(length) for length in LENGTHS]
    run = torch._inductor.aoti_load_package(package)
    for args in calls:
        assert largest_difference(run(*args), layer(*args)) < 1e-5

    inputs = tmp_path / "inputs.pt"
    torch.save(calls, inputs)
    without = load_elsewhere(package, inputs, imports="")
    assert "Could not find schema for dsafx::" in without.stderr
    done = load_elsewhere(package, inputs, imports="dsafx.ops")
    assert done.returncode == 0, done.stderr
    for args, found in zip(calls, torch.load(inputs), strict=True):
        assert largest_difference(found, layer(*args)) < 1e-5


def aot_compiled(model: torch.nn.Module, length: int, file: Path, **options: Any) -> list[Any]:
    """What ``aot_compile`` makes for any number of tokens, and the same saved and loaded."""
    args = tokens(length)
    for each in args:
        torch._dynamo.mark_dynamic(each, 0)
    # Before torch 2.13 this is off by default.
    with torch._dynamo.config.patch(enable_aot_compile=True):
        run = torch.compile(model, backend="dsafx", fullgraph=True, options=options)
        made: Any = run.forward.aot_compile((args, {}))
    made.save_compiled_function(str(file))
    with file.open("rb") as saved:
        return [made, torch.compiler.load_compiled_function(saved)]


@torch.no_grad()
@pytest.mark.parametrize(("first", "right", "wrong"), [(SHORT, SHORT_TOO, LONG), (LONG, 40, SHORT)])
def test_what_aot_compile_makes_checks_the_length_that_it_was_specialised_on(
    first: int, right: int, wrong: int, tmp_path: Path
):
    model = Select()
    with fresh_cache():
        for run in aot_compiled(model, first, tmp_path / "model"):
            check(lambda *args, run=run: run(model, *args), model, first, right)
            with pytest.raises(RuntimeError, match="GuardManager check failed"):
                run(model, *tokens(wrong))


@torch.no_grad()
def test_what_aot_compile_makes_checks_its_premise_where_guards_are_switched_off(tmp_path: Path):
    model = Select()
    with fresh_cache():
        for run in aot_compiled(model, SHORT, tmp_path / "model"):
            run.disable_guard_check()
            check(lambda *args, run=run: run(model, *args), model, SHORT_TOO)
            with pytest.raises(ValueError, match=f"compiled for at most {TOPK} keys a row, got"):
                run(model, *tokens(LONG))


@torch.no_grad()
def test_what_aot_compile_makes_without_specialising_takes_any_length(tmp_path: Path):
    model = Select()
    with fresh_cache():
        for run in aot_compiled(model, SHORT, tmp_path / "model", specialize="never"):
            check(lambda *args, run=run: run(model, *args), model, SHORT, LONG)


CACHED = """
import pathlib
import sys
import torch
from _graphs import Layer, largest_difference, prompt
from dsafx.passes import collect
from torch._dynamo.utils import counters

file = pathlib.Path(sys.argv[1])
loads = file.exists()
if loads:
    torch.compiler.load_cache_artifacts(file.read_bytes())
layer = Layer()
run = torch.compile(layer, backend="dsafx", fullgraph=True, dynamic=True)
with torch.no_grad(), collect() as reports:
    for length in (9, 37, 13):
        args = prompt(length)
        assert largest_difference(run(*args), layer(*args)) < 1e-5, length
if not loads:
    file.write_bytes(torch.compiler.save_cache_artifacts()[0])
stats = counters["inductor"]
print(len(reports), stats["fxgraph_cache_hit"], stats["fxgraph_cache_miss"])
"""


@pytest.mark.slow
def test_saved_cache_artifacts_give_another_process_both_variants(tmp_path: Path):
    def process(cache: str) -> list[int]:
        """Numbers of reports, hits and misses of a process with a cache folder of its own."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(HERE),
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache),
        }
        done = subprocess.run(
            [sys.executable, "-c", CACHED, str(tmp_path / "artifacts")],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return [int(number) for number in done.stdout.split()[-3:]]

    assert process("first") == [2, 0, 2]
    assert process("second") == [0, 2, 0]

"""The package as a whole: what importing it costs and needs, and which floor may import which."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import dsafx

FLOORS = ("ops", "fusion", "passes", "models")
KERNEL_LIBRARIES = ("triton", "flashinfer", "deep_gemm", "flash_mla", "fast_hadamard_transform")
OPTIONAL = {"transformers", "typer", "rich"}
KERNELS = "dsafx.ops.triton"


def modules() -> dict[str, Path]:
    """Every module of the installed package and its file, from the front door to the last floor."""
    found = {"dsafx": Path(dsafx.__file__)}
    for package in ("dsafx", *(f"dsafx.{floor}" for floor in FLOORS)):
        opened = importlib.import_module(package)
        found[package] = Path(opened.__file__)
        for info in pkgutil.walk_packages(opened.__path__, f"{package}."):
            if info.name.removeprefix("dsafx.") not in FLOORS:
                found[info.name] = Path(
                    info.module_finder.find_spec(info.name, None).origin  # type: ignore[union-attr]
                )
    return found


def module_level_imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    """Imports that run with the module: not those in functions or for the type checker."""
    found: list[ast.Import | ast.ImportFrom] = []
    pending: list[ast.stmt] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        elif isinstance(node, ast.If) and ast.unparse(node.test) != "TYPE_CHECKING":
            pending += node.body + node.orelse
        elif isinstance(node, ast.Try):
            pending += node.body + node.orelse + node.finalbody
            for handler in node.handlers:
                pending += handler.body
        elif isinstance(node, ast.ClassDef):
            pending += node.body
    return found


def top_level_names(nodes: list[ast.Import | ast.ImportFrom]) -> set[str]:
    """First components of the absolute imports among ``nodes``."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif node.level == 0 and node.module is not None:
            names.add(node.module.split(".")[0])
    return names


def all_imports(tree: ast.Module) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def floor_of(module: str) -> str:
    """The floor that a module lies on; ``dsafx`` is the front door."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else "dsafx"


def imported_modules(module: str, path: Path) -> set[str]:
    """Absolute names of the package's own modules that ``module`` imports, anywhere in it."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in all_imports(parse(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package.split(".")[: len(package.split(".")) - node.level + 1]
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{prefix}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.split(".")[0] == "dsafx"}


def run(code: str) -> str:
    """The output of ``code`` in a new interpreter."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_importing_the_package_costs_under_three_tenths_of_a_second_beyond_torch():
    code = """
        import time, torch
        start = time.process_time()
        import dsafx
        print(time.process_time() - start)
    """
    assert min(float(run(code)) for _ in range(3)) < 0.3


def test_importing_the_package_loads_no_model_library_and_no_floor_above_the_ops():
    loaded = run("import sys, torch, dsafx; print(*sys.modules)").split()
    unwanted = {*KERNEL_LIBRARIES, *OPTIONAL, "torch._inductor.compile_fx"}
    assert unwanted.isdisjoint(loaded)
    assert not {f"dsafx.{floor}" for floor in ("passes", "models", "fusion")}.intersection(loaded)


def test_every_module_imports_without_optional_libraries_and_without_asking_for_a_device():
    needs_extra = [
        name
        for name, path in modules().items()
        if top_level_names(module_level_imports(parse(path))) & OPTIONAL
    ]
    wanted = [
        name
        for name in modules()
        if name not in needs_extra
        and not name.endswith("__main__")
        and not name.startswith(KERNELS)
    ]
    code = f"""
        import importlib, sys
        for name in {[*KERNEL_LIBRARIES, *OPTIONAL]!r}:
            sys.modules[name] = None
        import torch, torch._dynamo, torch._inductor.compile_fx
        def refuse(*args, **kwargs):
            raise AssertionError("the device was touched while importing")
        for name in ("init", "_lazy_init", "is_available", "device_count", "current_device",
                     "get_device_capability", "get_device_properties", "synchronize"):
            setattr(torch.cuda, name, refuse)
        for name in {wanted!r}:
            importlib.import_module(name)
        print(len({wanted!r}))
    """
    assert int(run(code)) > len(FLOORS)


def test_only_commands_the_transformers_integration_and_kernels_need_an_extra_to_be_imported():
    for name, path in modules().items():
        imported = top_level_names(module_level_imports(parse(path)))
        needed = imported & {*OPTIONAL, *KERNEL_LIBRARIES}
        allowed: set[str] = set()
        if floor_of(name) == "models":
            allowed = {"transformers"}
        elif name.startswith(KERNELS):
            allowed = {"triton"}
        elif name.startswith(("dsafx._commands", "dsafx._demo", "dsafx._kernels")):
            allowed = OPTIONAL
        assert needed <= allowed, f"{name} imports {needed - allowed} at module level"


def test_everything_imported_is_declared_as_a_dependency_or_an_extra():
    declared = {
        re.sub("-python$", "", Requirement(line).name).replace("-", "_")
        for line in requires("dsafx") or []
    }
    for name, path in modules().items():
        for library in top_level_names(all_imports(parse(path))) - {"dsafx", "__future__"}:
            known = library in declared or library in sys.stdlib_module_names
            assert known, f"{name} imports {library}, which no dependency or extra names"


def test_a_floor_imports_only_from_itself_and_the_floors_below():
    order = [*FLOORS, "dsafx"]
    for name, path in modules().items():
        for target in imported_modules(name, path):
            below = order.index(floor_of(target)) <= order.index(floor_of(name))
            assert below, f"{name} on the floor {floor_of(name)} imports {target}"


def test_imports_inside_the_package_are_relative():
    for name, path in modules().items():
        assert "dsafx" not in top_level_names(all_imports(parse(path))), name


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_is_imported_once_and_never_under_its_folder_s_name(floor: str):
    importlib.import_module(f"dsafx.{floor}")
    folder = Path(importlib.import_module(f"dsafx.{floor}").__file__).parent
    copies = [
        name
        for name, module in sys.modules.items()
        if (file := vars(module).get("__file__")) and Path(file) == folder / "__init__.py"
    ]
    assert copies == [f"dsafx.{floor}"]


@pytest.mark.parametrize("name", dsafx.__all__)
def test_every_public_name_is_there(name: str):
    assert vars(dsafx).get(name) is not None or getattr(dsafx, name) is not None


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="no attribute 'disenable'"):
        _ = dsafx.disenable


def test_the_dynamo_backend_is_registered_by_entry_point():
    (entry,) = entry_points(group="torch_dynamo_backends", name="dsafx")
    assert entry.value == "dsafx._backend:backend"
    assert callable(entry.load())

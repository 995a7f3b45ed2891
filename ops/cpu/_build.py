"""C++ that is compiled at first use: once per machine and torch, then it lies on disk."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import torch

from .. import _options

_TORCH = Path(torch.__file__).parent
_COMPILE = ("-std=c++20", "-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
# What torch's own kernels are built with. Instructions of this very machine would not run on the
# others that share its disk.
_INSTRUCTIONS = {
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma"),
}
_SECONDS = 300


class BuildError(RuntimeError):
    """The library cannot be had; the message says why."""


class Entry:
    """The function ``name`` of one C++ file beside this one, compiled when it is first asked for.

    It takes a pointer to a struct, and answers null or what went wrong. That it is compiled takes
    about five seconds, once per machine and torch (see ``load``). Where that fails, one warning
    says that ``what`` runs on slower kernels, and why; the file is not asked for again.
    """

    def __init__(self, file: str, name: str, what: str) -> None:
        self.source = Path(__file__).with_name(file)
        self.name = name
        self.what = what
        self.asked = False
        self._library: ctypes.CDLL | None = None
        self._lock = threading.Lock()

    def serves(self) -> bool:
        """Whether ``call`` can be made, and compiled kernels are wanted."""
        if not _options.current().compiled_kernels:
            return False
        with self._lock:
            if not self.asked:
                self.asked = True
                try:
                    self._library = load(self.source)
                    getattr(self._library, self.name).restype = ctypes.c_char_p
                except BuildError as error:
                    warnings.warn(
                        f"{self.what} runs on slower kernels, for {error}",
                        RuntimeWarning,
                        stacklevel=3,
                    )
        return self._library is not None

    def call(self, problem: ctypes.Structure) -> None:
        """Call the function.

        Raises:
            RuntimeError: what it answered.
        """
        error = getattr(self._library, self.name)(ctypes.byref(problem))
        if error is not None:
            raise RuntimeError(error.decode())


def load(source: Path) -> ctypes.CDLL:
    """The shared library of one C++ file, compiled if it does not lie in the cache yet.

    The cache is a folder ``dsafx`` where torch keeps its extensions: ``TORCH_EXTENSIONS_DIR``, or
    ``torch_extensions`` in the user's cache. The compiler is ``CXX``, or ``c++``. Threads and
    processes that compile at the same time do not disturb each other.

    Raises:
        BuildError: no compiler, or it refuses the file; no place to write; not on Linux.
    """
    if sys.platform != "linux":
        raise BuildError(f"C++ is compiled on Linux only, not on {sys.platform}")
    compiler = os.environ.get("CXX", "c++")
    instructions = _INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ())
    command = (compiler, *_COMPILE, *instructions, f"-I{_TORCH / 'include'}", "-c", str(source))
    try:
        path = _cache() / f"{source.stem}-{_key(source, command)}.so"
        if not path.exists():
            _compile(command, compiler, path)
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(str(error)) from error


def _cache() -> Path:
    user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(user) / "torch_extensions"
    return Path(root) / "dsafx"


def _key(source: Path, command: tuple[str, ...]) -> str:
    made_of = (source.read_text(), torch.__version__, torch.version.git_version, *command)
    return hashlib.sha256("\0".join(map(str, made_of)).encode()).hexdigest()[:16]


def _compile(command: tuple[str, ...], compiler: str, path: Path) -> None:
    """Compile in a folder of our own, and put the finished library in place at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        compiled, linked = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        _run(*command, "-o", str(compiled))
        # Without -fopenmp: the OpenMP runtime is the one that torch has loaded, never a second one.
        libraries = (f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10")
        _run(compiler, "-shared", str(compiled), "-o", str(linked), *libraries)
        linked.replace(path)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took over {_SECONDS} seconds") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").splitlines()
        why = next((line for line in said if "error" in line), f"exit code {done.returncode}")
        raise BuildError(f"{command[0]} failed: {why}")

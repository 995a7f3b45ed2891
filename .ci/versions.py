"""Run the fast tests under several releases of torch and print what passed under each.

Each release gets a virtual environment of its own, which is kept for the next run: a release of
torch from the package registry brings its CUDA libraries and takes about 6 GB of disk.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

TREE = Path(__file__).resolve().parent.parent
RELEASES = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")


@dataclass(frozen=True)
class Outcome:
    """What one release gave; ``problem`` says why there are no counts, or why they do not count."""

    release: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    problem: str = ""

    @property
    def good(self) -> bool:
        return self.passed > 0 and not self.failed and not self.problem

    def row(self) -> str:
        counts = f"{self.passed:>8}{self.failed:>8}{self.skipped:>9}{self.seconds:>9.0f}"
        return f"{self.release:<9}{counts}  {self.problem}".rstrip()


HEADER = f"{'torch':<9}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}"


def install(release: str, environment: Path) -> Path:
    """Make or update the environment of a release and return its Python.

    Raises:
        subprocess.CalledProcessError: pip failed; it has printed why.
    """
    python = environment / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", f"torch=={release}"]
    # torch goes first and alone, as in the Makefile; in the second call it stays as it is.
    subprocess.run(pip, check=True)
    lines = (TREE / "requirements-dev.txt").read_text().splitlines()
    others = [line for line in lines if line and not line.startswith(("#", "torch=="))]
    subprocess.run([*pip, *others, "-e", ".[dev]"], check=True, cwd=TREE)
    return python


def run_tests(release: str, python: Path, results: Path, arguments: list[str]) -> Outcome:
    """Run the fast tests and read the counts from pytest's own report."""
    results.unlink(missing_ok=True)
    command = [str(python), "-m", "pytest", "-m", "not slow", f"--junitxml={results}", *arguments]
    started = time.monotonic()
    status = subprocess.run(command, cwd=TREE).returncode
    seconds = time.monotonic() - started
    if not results.exists():
        return Outcome(release, seconds=seconds, problem=f"pytest ended with {status}")
    suite = ElementTree.parse(results).getroot().find("testsuite")
    assert suite is not None
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    problem = f"pytest ended with {status}" if status and not failed else ""
    return Outcome(release, total - failed - skipped, failed, skipped, seconds, problem)


def check(release: str, folder: Path, arguments: list[str]) -> Outcome:
    """Install one release and run the tests under it."""
    print(f"\n== torch {release}", flush=True)
    try:
        python = install(release, folder / f"torch-{release}")
    except subprocess.CalledProcessError:
        return Outcome(release, problem="not installed")
    return run_tests(release, python, folder / f"torch-{release}.xml", arguments)


def main() -> None:
    """Exit with 0 where each release was installed and passed all tests."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Arguments after -- go to pytest, such as: -- -n 2 tests/test_backend.py",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "releases", nargs="*", metavar="RELEASE", help=f"default: {' '.join(RELEASES)}"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=TREE / "build" / "versions",
        help="where environments and reports are kept (default: build/versions)",
    )
    given = [*sys.argv[1:], "--"]
    end = given.index("--")
    arguments, for_pytest = parser.parse_args(given[:end]), given[end + 1 : -1]
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    releases = arguments.releases or RELEASES
    outcomes = [check(release, folder, for_pytest) for release in releases]
    print("", HEADER, *(each.row() for each in outcomes), sep="\n")
    sys.exit(not all(each.good for each in outcomes))


if __name__ == "__main__":
    main()

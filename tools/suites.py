"""Run test suites and close with one table and one count.

Standard library only; it is run by the interpreter of the environment under test. A suite is a folder of a package
(its tests/ is taken), a folder of tests or one file of them. Each runs in a pytest process of its own, so that files of
the same name do not meet, and a suite that crashes does not take the others along. `LANES` suites run at a time, the
longest first, since ranks wait for each other more than they compute; what a suite prints appears when it is done.

Ranks of several suites share few cores. Three settings, which every process inherits, keep them from wasting those:

* OMP_NUM_THREADS is 1 where it is not set. The models of tests are too small for more threads, which spin while they
  wait for each other.
* The scheduler's policy is SCHED_BATCH: a process that is woken waits for its turn. By default it takes the core from
  the one that woke it, which often sends just then, so with a lock of gloo's, for which gloo's own thread spins.
* ZERO_TORCH_UNCOLLECTED is set: in an environment of `tools/environments.py`, interpreters that tests start import
  torch without the garbage collector (`tools/torch_uncollected.py`).
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS_COLLECTED = 5
LANES = 4
"""Suites at a time: of two, whose ranks wait for each other, two cores are idle half of the time. Tests hold no bound
on wall time that a busy machine could miss; benches measure alone."""
PARTS = {"tests-integration": 6, "zero-core": 2}
"""Suites whose files are dealt out to several processes when suites run side by side: in so many that none of them,
dealt out unevenly as the times of files are, runs on alone at the end."""
LONGEST = ("tests-integration", "zero-core", "zero-launch", "zero-plan", "zero-ckpt", "zero-comm")
"""Suites that begin first, so that none of them runs on alone at the end."""


@dataclass(frozen=True)
class Suite:
    """One pytest process: a name, the suite's folder, and its tests, a folder or files."""

    name: str
    folder: Path
    tests: tuple[Path, ...]

    @classmethod
    def of(cls, folder: Path) -> Suite:
        """Return the suite of a package, of a folder of tests, or of one file."""
        return cls(folder.name, folder, (folder / "tests" if (folder / "tests").is_dir() else folder,))

    def parts(self) -> list[Suite]:
        """Return the suite, or its test files in turn as the suites that `PARTS` says."""
        count = PARTS.get(self.name, 1)
        files = sorted(self.tests[0].rglob("test_*.py")) if count > 1 else []
        if not files:
            return [self]
        return [
            Suite(f"{self.name} {number + 1}-{count}", self.folder, tuple(files[number::count]))
            for number in range(count)
        ]


@dataclass
class Outcome:
    """The result of one suite: pytest's exit status, its counts and its wall time in seconds."""

    name: str
    status: int
    passed: int
    failed: int
    skipped: int
    seconds: float

    @property
    def word(self) -> str:
        if self.status == 0:
            return "ok"
        return "NO TESTS" if self.status == NO_TESTS_COLLECTED else f"FAILED (exit status {self.status})"


def every_suite() -> list[Path]:
    packages = sorted(path.parent for path in ROOT.glob("packages/*/pyproject.toml"))
    return [*packages, ROOT / "tests-integration"]


def count(report: Path) -> tuple[int, int, int]:
    """Passed, failed (errors too) and skipped tests of a JUnit file; zeros when pytest died before it wrote one."""
    if not report.exists():
        return 0, 0, 0
    passed = failed = skipped = 0
    for suite in ElementTree.parse(report).getroot().iter("testsuite"):
        bad = int(suite.get("failures", 0)) + int(suite.get("errors", 0))
        idle = int(suite.get("skipped", 0))
        failed += bad
        skipped += idle
        passed += int(suite.get("tests", 0)) - bad - idle
    return passed, failed, skipped


def run_suite(suite: Suite, marker: str | None, pytest_args: list[str], scratch: Path, alone: bool) -> Outcome:
    if not all(tests.exists() for tests in suite.tests):
        return Outcome(suite.name, NO_TESTS_COLLECTED, 0, 0, 0, 0.0)
    report = scratch / f"{suite.name}.xml"
    command = [sys.executable, "-m", "pytest", *map(str, suite.tests), f"--junitxml={report}"]
    command += ["-o", "junit_family=xunit1", "-q"]
    command += ["--durations=25", "--durations-min=4"]
    command += ["-m", marker] if marker else []
    title = f"\n=== {suite.name} ===\n"
    begin = time.monotonic()
    # The working directory is not the repository: a test must not depend on it, nor import a package from its sources.
    work = scratch / suite.name
    work.mkdir()
    if alone:
        print(title, end="", flush=True)
        status = subprocess.run([*command, *pytest_args], cwd=work, check=False).returncode
    else:
        print(f"{suite.name} begins", flush=True)
        printed = scratch / f"{suite.name}.txt"
        with printed.open("wb") as sink:
            status = subprocess.run(
                [*command, *pytest_args], cwd=work, check=False, stdout=sink, stderr=subprocess.STDOUT
            ).returncode
        sys.stdout.write(title + printed.read_text(encoding="utf-8", errors="replace"))
        sys.stdout.flush()
    return Outcome(suite.name, status, *count(report), time.monotonic() - begin)


def run_suites(folders: list[Path], marker: str | None, pytest_args: list[str]) -> list[Outcome]:
    """Run the suites, `LANES` at a time; outcomes in the order of ``folders``. Marked tests run one suite at a time."""
    lanes = 1 if marker or len(folders) == 1 else LANES
    suites = [part for folder in folders for part in (Suite.of(folder).parts() if lanes > 1 else [Suite.of(folder)])]
    last = len(LONGEST)
    begin_with = sorted(suites, key=lambda s: LONGEST.index(s.folder.name) if s.folder.name in LONGEST else last)
    with tempfile.TemporaryDirectory(prefix="zero-suites-") as scratch, ThreadPoolExecutor(lanes) as pool:
        running = {
            suite: pool.submit(run_suite, suite, marker, pytest_args, Path(scratch), lanes == 1) for suite in begin_with
        }
        return [running[suite].result() for suite in suites]


def main() -> int:
    """Run the suites that the command line names; the exit status is 0 when all of them passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="packages, folders of tests, or files")
    parser.add_argument("--all", action="store_true", help="every package, and tests-integration")
    parser.add_argument("--marker", help="run the tests with this marker; a suite without one is no failure")
    own, pytest_args = sys.argv[1:], []
    if "--" in own:
        cut = own.index("--")
        own, pytest_args = own[:cut], own[cut + 1 :]
    args = parser.parse_args(own)
    folders = [folder.resolve() for folder in args.folders] + (every_suite() if args.all else [])
    if not folders:
        parser.error("name a suite, or say --all")

    # A shell's background job ignores SIGINT and hands that down; tests of Ctrl-C need the signal as users have it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["ZERO_TORCH_UNCOLLECTED"] = "1"
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    begin = time.monotonic()
    outcomes = run_suites(folders, args.marker, pytest_args)
    elapsed = time.monotonic() - begin

    width = max(len(outcome.name) for outcome in outcomes)
    print("\n=== all suites ===")
    for outcome in outcomes:
        counts = f"{outcome.passed:5d} passed {outcome.failed:4d} failed {outcome.skipped:4d} skipped"
        print(f"{outcome.name:{width}s} {counts} {outcome.seconds:7.1f} s  {outcome.word}")
    passed, failed, skipped = (sum(getattr(o, field) for o in outcomes) for field in ("passed", "failed", "skipped"))
    bad = [outcome for outcome in outcomes if outcome.status not in ((0, NO_TESTS_COLLECTED) if args.marker else (0,))]
    nothing_ran = passed + failed == 0
    if bad:
        print(f"not passed: {', '.join(outcome.name for outcome in bad)}")
    if nothing_ran:
        print("no test ran")
    print(f"{passed} passed, {failed} failed, {skipped} skipped in {elapsed:.0f} s", flush=True)
    return 1 if bad or nothing_ran else 0


if __name__ == "__main__":
    sys.exit(main())

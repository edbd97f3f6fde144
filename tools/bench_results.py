"""The result files of benchmarks: what a benchmark measured, with the machine, date, commit and versions.

`python tools/bench_results.py FOLDER SCRIPT [ARGUMENTS]` runs a benchmark, shows its output, and keeps it as
`FOLDER/SCRIPT.json`, one row per line; `nox -s bench` does so with `build/bench-results`. A benchmark can also write
its tables as the page has them, by `save`. Files that are kept are in docs/results/, of which
`tools/benchmark_page.py` makes the tables of docs/benchmarks.md.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("torch", "deepspeed", "transformers", "accelerate", "safetensors", "fio")
"""Programs and distributions whose versions a result says."""


def save(script: str, name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write the table ``name`` that ``script`` (its ``__file__``) measured to ``name.json``, in the folder that
    ZERO_BENCH_RESULTS names; do nothing without. ``rows``: cells as the page shows them.
    """
    folder = os.environ.get("ZERO_BENCH_RESULTS")
    if not folder:
        return
    result = {
        "bench": Path(script).resolve().relative_to(ROOT).as_posix(),
        "machine": machine(),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "commit": commit(),
        "versions": {peer: found for peer in PEERS if (found := version(peer))},
        "columns": list(columns),
        "rows": [[str(cell) for cell in row] for row in rows],
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / f"{name}.json").write_text(dump(result), encoding="utf-8")


def dump(result: dict[str, object]) -> str:
    """Return a result file's text: JSON with one line per row."""
    head = {key: value for key, value in result.items() if key != "rows"}
    rows = result["rows"]
    assert isinstance(rows, list)
    lines = ",\n    ".join(json.dumps(row, ensure_ascii=False) for row in rows)
    return (
        json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}") + f',\n  "rows": [\n    {lines}\n  ]\n}}\n'
    )


def machine() -> str:
    """Return the processor, how many of its threads this process may use, and the accelerator, if torch sees one."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in facts.splitlines() if line.startswith("model name")]
    found = f"{len(os.sched_getaffinity(0))} threads of {names[0] if names else os.uname().machine}"
    torch = sys.modules.get("torch")
    if torch is not None and torch.accelerator.is_available():
        device = torch.get_device_module(torch.accelerator.current_accelerator())
        found += f", {torch.accelerator.device_count()} x {device.get_device_name(0)}"
    return found


def commit() -> str:
    """Return the commit of this checkout, with "and changes" where files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
        return done.stdout.strip()

    changed = " and changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return (git("rev-parse", "--short=8", "HEAD") or "not recorded") + changed


def version(peer: str) -> str:
    """Return the installed version of one of `PEERS`; an empty text without it."""
    if peer == "fio":
        path = shutil.which("fio")
        found = subprocess.run([path, "--version"], capture_output=True, text=True).stdout if path else ""
        return found.strip().removeprefix("fio-")
    try:
        return importlib.metadata.version(peer)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark and keep its output; return its exit status."""
    folder, script, *rest = sys.argv[1:] if arguments is None else arguments
    os.environ["ZERO_BENCH_RESULTS"] = str(Path(folder).resolve())
    lines = []
    with subprocess.Popen([sys.executable, script, *rest], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        for line in job.stdout:
            print(line, end="", flush=True)
            lines.append([line.rstrip()])
    if job.returncode == 0:
        save(script, Path(script).stem, ["output"], (line for line in lines if line[0]))
    return job.returncode


if __name__ == "__main__":
    sys.exit(main())

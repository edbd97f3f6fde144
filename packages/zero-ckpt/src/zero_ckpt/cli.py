"""The command `zero-ckpt`: its subcommands, one function each, which print results and return the exit status.

A root is a directory of checkpoints, each in a folder that is named by its tag; the root's file `latest` names the
newest. `options` are the parsed arguments of the command line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TextIO

from . import __version__
from .errors import CheckpointError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status: 0 success, 1 damage or a difference found, 2 not possible.

    `arguments` are by default those of the process. The status is 141 when the reader of the output has closed it.
    """
    options = parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141  # as the shell reports a program that a closed pipe ended
    except (CheckpointError, OSError) as error:
        for line in str(error).split("\n"):
            _print_line(f"zero-ckpt {options.command}: {line}", sys.stderr)
        return 2
    return status


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests, for an unknown word, the known one that is spelt most like it. Named as the
    parsers of other commands."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, with the suggestion if there is one, and end the process with status 2."""
        import difflib

        unknown = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        near = difflib.get_close_matches(unknown[1], re.findall(r"[\w.-]+", unknown[2]), n=1) if unknown else []
        super().error(f"{message}; did you mean {near[0]!r}?" if near else message)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line. The namespace that it returns has the subcommand's name as `command` and
    the function that runs it as `run`."""
    parser: argparse.ArgumentParser = _Parser(
        prog="zero-ckpt",
        description="Look at, check, repair and convert checkpoints.",
        epilog="example: zero-ckpt convert run/checkpoints model.safetensors --dtype bf16",
    )
    parser.add_argument("--version", action="version", version=f"zero-ckpt {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    root = "the folder given to save_checkpoint, which holds the checkpoints"
    spec = "a root, root@tag, root@step, or a checkpoint directory"

    def add(name: str, about: str, example: str) -> argparse.ArgumentParser:
        """Add the subcommand `name` and return its parser. `about` is its one line of help; `example` shows a use of
        it, without the program's name."""
        made: argparse.ArgumentParser = commands.add_parser(name, help=about, epilog=f"example: zero-ckpt {example}")
        return made

    command = add("inspect", "print names, shapes, dtypes and sizes", "inspect run/checkpoints@step100")
    command.add_argument("checkpoint", help=spec + "; safetensors, DeepSpeed or torch DCP, too")
    command.add_argument("--json", action="store_true", help="print everything as JSON")
    command.set_defaults(run=_inspect)

    command = add("verify", "read everything and compare checksums", "verify run/checkpoints")
    command.add_argument("checkpoint", help=spec + "; a root stands for all its checkpoints")
    command.set_defaults(run=_verify)

    about = "sweep, restore from twins, set the damaged aside, fix latest"
    command = add("repair", about, "repair run/checkpoints --dry-run")
    command.add_argument("root", help=root)
    command.add_argument("--dry-run", action="store_true", help="only say what would be done")
    command.set_defaults(run=_repair)

    command = add("diff", "compare two checkpoints", "diff run/checkpoints@step100 run/checkpoints@step200")
    command.add_argument("first", help=spec)
    command.add_argument("second", help=spec)
    command.set_defaults(run=_diff)

    command = add("prune", "remove all but the newest checkpoints", "prune run/checkpoints --keep-last 3 --dry-run")
    command.add_argument("root", help=root)
    command.add_argument("--keep-last", type=int, required=True, metavar="N", help="how many to keep")
    command.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    command.set_defaults(run=_prune)
    _add_convert_parser(commands)
    return parser


def _add_convert_parser(commands: Any) -> None:
    """Add the subcommand `convert` and its options to argparse's subparsers, `commands`."""
    command = commands.add_parser(
        "convert",
        help="write another format, or another dtype",
        epilog="example: zero-ckpt convert run/checkpoints model.safetensors --dtype bf16",
    )
    command.add_argument("source", help="a checkpoint of this package, safetensors, DeepSpeed, or torch DCP")
    command.add_argument("target", help="a .safetensors or .bin file, or a directory")
    formats = ("safetensors", "pytorch", "deepspeed-universal", "zero-ckpt")
    command.add_argument("--to", choices=formats, help="the format; by default told by the target's name")
    command.add_argument("--dtype", default="fp32", help="fp32 (default), bf16, fp16 or keep")
    command.add_argument("--max-shard-size", metavar="SIZE", help="cut files at this size, such as 5GB")
    command.add_argument("--overwrite", action="store_true", help="replace what is there already")
    command.add_argument("--workers", type=int, default=4, help="pieces in flight (default 4)")
    command.set_defaults(run=_convert)


def _inspect(options: argparse.Namespace) -> int:
    """Print what the checkpoint that `options` names holds, as text or, with `--json`, as JSON, and return the exit
    status 0.

    Raises CheckpointError when there is none or it cannot be read.
    """
    from .conversion import open_source
    from .inspecting import describe, describe_source, source_text, tree_text
    from .reader import Checkpoint

    source = open_source(options.checkpoint)
    if options.json:
        found = describe(source) if isinstance(source, Checkpoint) else describe_source(source)
        json.dump(found, sys.stdout, indent=2, default=_json_default)
        print()
        return 0
    for line in tree_text(source) if isinstance(source, Checkpoint) else source_text(options.checkpoint, source):
        _print_line(line)
    return 0


def _print_line(line: str, file: TextIO | None = None) -> None:
    """Print one line to `file`, by default standard output. Unprintable characters, such as a line feed or a terminal's
    control characters, are printed as escapes, as names in a checkpoint may hold anything."""
    file = file or sys.stdout
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in line)
    encoding = file.encoding or "utf-8"
    print(shown.encode(encoding, "backslashreplace").decode(encoding), file=file)


def _json_default(value: Any) -> Any:
    """Return a JSON form of a value that JSON lacks: `{"bytes": <hex>}` for bytes, text for anything else."""
    return {"bytes": value.hex()} if isinstance(value, bytes) else str(value)


def _verify(options: argparse.Namespace) -> int:
    """Verify the checkpoint that `options` names; of a root, every checkpoint and its `latest`.

    Prints one line per damage and per checkpoint. Returns the exit status: 0 when all are good, 1 when any is damaged.
    Raises NotFoundError when there is no checkpoint.
    """
    from .commit import holds_checkpoint
    from .locating import find_tag, split_spec
    from .repairing import require_root
    from .verifying import checkpoints_in

    root, which = split_spec(options.checkpoint)
    if which is None and holds_checkpoint(root):
        return _verify_each([root], in_root=False)
    require_root(root)
    paths = checkpoints_in(root) if which is None else [root / find_tag(root, which)]
    latest = _latest_problem(root) if which is None else None
    if latest is not None:
        _print_line(latest)
    return max(_verify_each(paths, in_root=True), 0 if latest is None else 1)


def _verify_each(paths: Sequence[Path], *, in_root: bool) -> int:
    """Verify the checkpoint directories `paths`, print the findings, and return the exit status: 0 when all are good,
    otherwise 1.

    `in_root`: they lie in a root. There, a directory that holds a checkpoint of another tag is damaged, and one that
    another process removes during the verification is passed over.
    """
    from .inspecting import size_text
    from .verifying import verify_candidate

    good = True
    for path in paths:
        with _progress(f"verify {path.name}", _data_nbytes(path)) as advance:
            report = verify_candidate(path, in_root=in_root, progress=advance)
        if in_root and report.moved:
            _print_line(f"{path}: replaced or removed while it was verified")
            continue
        for problem in report.problems:
            _print_line(str(problem))
        _print_line(f"{path}: {'good' if report.ok else 'DAMAGED'}, {size_text(report.nbytes)}")
        if report.absent:
            _print_line(f"  not on this node: {', '.join(report.absent)}")
        if report.saved_as is not None:
            _print_line(f"  was saved as {report.saved_as}")
        good = good and report.ok
    return 0 if good else 1


def _latest_problem(root: Path) -> str | None:
    """Return one sentence that says why the root's `latest` cannot be followed; None when the file is absent or names
    an existing directory."""
    from .latest import is_tag, read_latest

    try:
        tag = read_latest(root)
    except CheckpointError as error:
        return str(error)
    if tag is None or (is_tag(tag) and (root / tag).is_dir()):
        return None
    return f"{root}: `latest` names {tag!r}, but there is no such checkpoint"


def _data_nbytes(checkpoint: Path) -> int:
    """Return the total size in bytes of the data files in a checkpoint directory, including hard-linked ones, for a
    progress bar."""
    from .commit import is_data_file

    nbytes = 0
    for file in checkpoint.glob("rank-*"):
        try:
            nbytes += file.lstat().st_size if is_data_file(file.name) else 0
        except FileNotFoundError:  # another process has just removed it
            continue
    return nbytes


def _repair(options: argparse.Namespace) -> int:
    """Repair the root that `options` names, or with `--dry-run` only find what to repair. Prints what was done and
    returns the exit status 0.

    Raises NotFoundError when the root holds no checkpoint, and CheckpointError when it stays locked for ten minutes.
    """
    from .repairing import repair
    from .verifying import checkpoints_in

    root = Path(options.root)
    total = sum(_data_nbytes(path) for path in checkpoints_in(root)) if root.is_dir() else 0
    with _progress("repair", total) as advance:
        done = repair(root, dry_run=options.dry_run, progress=advance)
    for line in done:
        _print_line(line)
    outcome = "nothing to repair" if not done else "nothing was changed" if options.dry_run else "repaired"
    _print_line(f"{options.root}: {outcome}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    """Print the differences of the two checkpoints in the parsed `options`, by name. Returns the exit status, 0 when
    there are none, otherwise 1. Raises NotFoundError or DamagedError when one cannot be opened or read.
    """
    from .comparing import diff
    from .locating import open_spec

    first, second = open_spec(options.first), open_spec(options.second)
    with _progress("diff", sum(tensor.nbytes for tensor in first.tensors.values())) as advance:
        report = diff(first, second, progress=advance)
    for title, names in (
        (f"only in {options.first}", report.only_first),
        (f"only in {options.second}", report.only_second),
        ("other shape or dtype", report.reshaped),
        ("other values", report.changed),
        ("other", report.plain),
    ):
        for name in names:
            _print_line(f"{title}: {name}")
    print(f"{report.equal} tensors are equal")
    return 0 if report.same else 1


def _prune(options: argparse.Namespace) -> int:
    """Remove old checkpoints of the root that `options` names, or with `--dry-run` none. Prints the paths and returns
    the exit status 0.

    Raises NotFoundError when the root holds no checkpoint, DamagedError when its `latest` cannot be read, and
    CheckpointError when it stays locked for ten minutes.
    """
    from .repairing import require_root
    from .retention import prune

    require_root(Path(options.root))
    for path in prune(Path(options.root), keep_last=options.keep_last, dry_run=options.dry_run):
        _print_line(f"{'would remove' if options.dry_run else 'removed'} {path}")
    return 0


def _convert(options: argparse.Namespace) -> int:
    """Convert the checkpoint that `options` names, print the files that were written, and return the exit status 0.

    Raises CheckpointError when the input cannot be read or the output must not be written (see `convert`).
    """
    from .conversion import convert, open_source, output_nbytes

    source = open_source(options.source)
    with _progress("convert", output_nbytes(source, options.target, to=options.to, dtype=options.dtype)) as advance:
        written = convert(
            source,
            options.target,
            to=options.to,
            dtype=options.dtype,
            max_shard_size=options.max_shard_size,
            workers=options.workers,
            progress=advance,
            overwrite=options.overwrite,
        )
    for path in written:
        print(path)
    return 0


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None] | None]:
    """Show a progress bar of `total` bytes on standard error while the `with` statement runs.

    Yields the function that advances it by a number of bytes; None where standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(title, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


if __name__ == "__main__":
    sys.exit(main())

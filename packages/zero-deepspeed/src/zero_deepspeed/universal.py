"""`deepspeed.checkpoint.ds_to_universal`: the command that makes a universal checkpoint, over `zero_ckpt.convert`."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from zero_ckpt import convert
from zero_core.errors import UsageError

logger = logging.getLogger("DeepSpeed")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the parsed command line ``arguments``; None for those of this process. Exits with status 2 if they are
    wrong, as argparse does."""
    parser = argparse.ArgumentParser(
        prog="ds_to_universal", description="Convert a checkpoint to DeepSpeed's universal form."
    )
    parser.add_argument("--input_folder", required=True, help="the checkpoint: the folder of one tag")
    parser.add_argument("--output_folder", required=True, help="the folder to make")
    parser.add_argument("--num_extract_workers", type=int, default=4, help="tensors that are converted at a time")
    parser.add_argument("--num_merge_workers", type=int, default=2, help="no effect: nothing is merged afterwards")
    parser.add_argument("--keep_temp_folder", action="store_true", help="no effect: there is none")
    parser.add_argument("--no_strict", dest="strict", action="store_false", help="no effect: all is checked")
    parser.add_argument("--inject_missing_state", action="store_true", help="no effect: nothing needs it")
    return parser.parse_args(arguments)


def main(args: argparse.Namespace | None = None) -> None:
    """Convert the checkpoint in ``args.input_folder`` to a universal one in ``args.output_folder``, and write the new
    folder's name to the file `latest_universal` beside it.

    ``args``: the result of `parse_arguments`; None to parse this process's command line. Raises
    `zero_ckpt.CheckpointError`, and `UsageError` if the output exists.
    """
    asked = parse_arguments() if args is None else args
    output = Path(asked.output_folder).absolute()
    if output.exists():
        raise UsageError(f"--output_folder {output} exists already: remove it, or name another")
    unfinished = output.with_name(f".{output.name}.unfinished")
    made = convert(asked.input_folder, unfinished, to="deepspeed-universal", workers=max(1, asked.num_extract_workers))
    os.rename(made[0], output)
    latest = unfinished / "latest_universal"
    latest.write_text(output.name)
    os.replace(latest, output.with_name(latest.name))
    shutil.rmtree(unfinished)
    logger.info("wrote %s", output)

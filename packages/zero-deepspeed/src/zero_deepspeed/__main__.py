"""`python -m zero_deepspeed` prints the folder for PYTHONPATH; with `--bin`, the one for PATH."""

from __future__ import annotations

import argparse
from importlib.metadata import version

from zero_deepspeed import commands, path


def main() -> None:
    """Print the folder that the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m zero_deepspeed",
        description=__doc__,
        epilog="example: PATH=$(python -m zero_deepspeed --bin):$PATH deepspeed train.py",
    )
    parser.add_argument("--version", action="version", version=f"zero-deepspeed {version('zero-deepspeed')}")
    parser.add_argument("--bin", action="store_true", help="the folder with the commands deepspeed and ds_report")
    print(commands() if parser.parse_args().bin else path())


if __name__ == "__main__":
    main()

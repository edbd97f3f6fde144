"""Fuzz one target with Atheris: `python fuzz_run.py TARGET [libFuzzer's options]`, for `nox -s fuzz`.

Coverage of the packages' code chooses which changed copies of the seeds are changed further. An error that is not the
reader's own, a case of more than 10 s and a process beyond its memory end the run; the case is then in the working
directory, as `fuzz-TARGET-…` or under libFuzzer's name.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import sys
import tempfile
import traceback
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["zero_ckpt", "zero_nvme_aio", "zero_settings", "zero_launch"]):
    from fuzz_targets import MOST_MEMORY, TARGETS, looked_up_once

from fuzz_mutations import changed

MEMORY_FOLDER = "/dev/shm"
"""Where a case is written, if there is such a folder: a disk takes longer than most readers."""
MOST_SECONDS = 10
MOST_BYTES = 1 << 17
"""Of one case."""


def main() -> None:
    """Fuzz the target that `sys.argv` names until libFuzzer's `-runs` are done."""
    name, *options = sys.argv[1:]
    logging.disable()
    in_memory = MEMORY_FOLDER if os.path.isdir(MEMORY_FOLDER) else None
    with tempfile.TemporaryDirectory(dir=in_memory) as folder, looked_up_once():
        work, corpus = Path(folder) / "work", Path(folder) / "corpus"
        work.mkdir()
        corpus.mkdir()
        target = TARGETS[name](work)
        for number, seed in enumerate(target.seeds()):
            (corpus / str(number)).write_bytes(seed)
            target.check(seed)

        def change(data: bytes, most: int, seed: int) -> bytes:
            rng = random.Random(seed)
            if rng.random() < 0.3:
                return atheris.Mutate(data, most)
            return changed(data, rng, target.form)[:most]

        def check(data: bytes) -> None:
            try:
                target.check(data)
            except BaseException:
                case = Path(f"fuzz-{name}-{hashlib.sha256(data).hexdigest()[:16]}")
                case.write_bytes(data)  # after an error Atheris writes none
                traceback.print_exc(file=sys.__stderr__)
                print(f"the case is in {case.resolve()}", file=sys.__stderr__)
                raise

        bounds = [f"-rss_limit_mb={MOST_MEMORY[name] >> 20}", f"-timeout={MOST_SECONDS}", f"-max_len={MOST_BYTES}"]
        arguments = [sys.argv[0], *bounds, "-print_final_stats=1", *options, str(corpus)]
        atheris.Setup(arguments, check, custom_mutator=change)
        # libFuzzer writes its log to the descriptor; what the packages print would bury it.
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            atheris.Fuzz()


if __name__ == "__main__":
    main()

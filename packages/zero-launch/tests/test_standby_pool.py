"""A pool that gives up its standbys leaves ranks that run alone."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from zero_launch.standby_pool import StandbyPool

_SECONDS = 60.0


def test_standbys_that_are_given_up_do_not_take_their_running_ranks_along(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    script = tmp_path / "script.py"
    script.write_text(f"open({str(gate)!r}).read()\n")  # returns once somebody has opened it and closed it again
    (tmp_path / "ends.py").write_text("import os\n\nos._exit(3)\n")
    search_path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    said: list[str] = []
    pool = StandbyPool(
        [sys.executable, "-m", "zero_launch.rank", "script", str(script)],
        lambda local_rank: search_path if local_rank else {},
        tmp_path,
        said.append,
    )
    try:
        (tmp_path / "imports0.json").write_text('[["json", {}]]')
        pool.adjust_to(1)
        rank = pool.take(0, dict(os.environ), None, None, _SECONDS)
        assert rank is not None
        (tmp_path / "imports1.json").write_text('[["ends", {}]]')
        end = time.monotonic() + _SECONDS
        while not said and time.monotonic() < end:
            pool.adjust_to(2)
        assert said == ["no standbys, every restart imports again: importing ahead ended the process"]
        assert rank.poll() is None
        gate.write_text("")
        assert rank.wait(_SECONDS) == 0
        pool.adjust_to(2)
        assert not pool.pids
        assert pool.take(0, dict(os.environ), None, None, _SECONDS) is None
    finally:
        pool.close()

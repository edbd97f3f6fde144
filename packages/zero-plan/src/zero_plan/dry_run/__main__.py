"""Run a script dry as one rank: ``python -m zero_plan.dry_run ASKED ANSWER``, the paths of two JSON files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ..errors import PlanError
from ..scripts import ScriptRank
from .script import plan_script_load, plan_script_rank


def write_answer(asked: Path, answered: Path) -> None:
    """Run the `ScriptRank` in the file ``asked``; write a JSON object to the file ``answered``: "plan" and "lines", or
    "loaded" if it has a manifest, or "error", the text of a `PlanError`. Any other exception leaves that file
    unwritten.
    """
    given = ScriptRank.read(asked)
    try:
        if given.manifest is not None:
            found: dict[str, Any] = {"loaded": plan_script_load(given).as_dict()}
        else:
            plan, lines = plan_script_rank(given)
            found = {"plan": plan.as_dict(), "lines": lines}
    except PlanError as error:
        found = {"error": str(error)}
    answered.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    write_answer(Path(sys.argv[1]), Path(sys.argv[2]))

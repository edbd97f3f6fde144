"""What the optimizer lists and keeps is a part of each parameter: what works element by element ends as with plain
torch, and anything else is refused on every rank by the parameter's name, before a weight has changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import script_fragments
import user_scripts
from test_user_scripts import complaint
from user_scripts import Where

from zero_comm import run_ranks

SOAK = pytest.mark.soak


def all_outcomes(where: Where) -> dict[str, user_scripts.Outcome]:
    return {
        name: user_scripts.run_sharded(name, replace(where, folder=str(Path(where.folder, str(number)))))
        for number, name in enumerate(script_fragments.script)
    }


@pytest.mark.parametrize(
    ("world", "where"),
    [
        (2, Where(1)),
        (2, Where(3)),
        (2, Where(3, "cpu")),
        pytest.param(1, Where(1, "cpu"), marks=SOAK),
        pytest.param(2, Where(3, "nvme"), marks=SOAK),
        pytest.param(3, Where(2), marks=SOAK),
        pytest.param(3, Where(3), marks=SOAK),
        pytest.param(2, Where(0), marks=SOAK),
        pytest.param(1, Where(3), marks=SOAK),
    ],
    ids=str,
)
def test_parts_stand_for_their_parameters(world: int, where: Where, tmp_path: Path) -> None:
    ended = run_ranks(all_outcomes, world, replace(where, folder=str(tmp_path)), timeout=240)
    for name in script_fragments.script:
        outcomes = [rank[name] for rank in ended]
        assert not complaint(outcomes, user_scripts.run_plain(name)), name
        refusals = {outcome.refused for outcome in outcomes}
        if refusals != {""}:
            assert name not in may_run(where), refusals
            assert all("parameter '0.weight'" in one for one in refusals), (name, refusals)
        elif world > 1 and where.stage > 0:
            assert name in may_run(where), name


def may_run(where: Where) -> list[str]:
    """The scripts that do what they do with plain torch; at stages 1 to 3 any other has to be refused. A tier has the
    values in its own memory."""
    equal = script_fragments.EQUAL
    if where.tier != "device":
        in_hooks = ("averages_the_listed_weights", "shrinks_where_all_have_gradients")
        equal = [name for name in equal if not name.startswith("in a hook") and name not in in_hooks]
    reads = ["the model in a hook: averages before"] if where.stage < 3 else []
    return [*equal, *reads]

"""Changed copies of what is read from outside are read or refused by the reader's own error, whatever was changed."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fuzz_mutations import changed
from fuzz_targets import TARGETS, looked_up_once

CASES = 400


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TARGETS)
def test_changed_copies_are_read_or_refused(name: str, tmp_path: Path) -> None:
    rng = random.Random(5)
    with looked_up_once():
        target = TARGETS[name](tmp_path)
        seeds = target.seeds()
        read = [target.check(seed) for seed in seeds]
        assert any(read), f"no seed of {name} is read"
        refused = [not target.check(changed(rng.choice(seeds), rng, target.form)) for _ in range(CASES)]
    assert any(refused) and not all(refused), "the changes are no test"

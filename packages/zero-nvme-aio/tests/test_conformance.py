"""Every backend passes the suite that is shipped for people who write one, on every file system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zero_nvme_aio import Engine
from zero_nvme_aio.testing import Delay, EngineConformance, Reorder, Shorten, faulty_engine


class TestBackends(EngineConformance):
    @pytest.fixture(autouse=True)
    def _where(self, backend: str, folder: Path) -> None:
        self.backend, self.place = backend, folder

    def make_engine(self, **settings: Any) -> Engine:
        return Engine(backend=self.backend, **settings)

    def folder(self, tmp_path: Path) -> Path:
        return self.place


class TestTwoProgressThreads(EngineConformance):
    def make_engine(self, **settings: Any) -> Engine:
        return Engine(threads=2, **settings)


class TestSingleSubmitWithoutOverlap(EngineConformance):
    def make_engine(self, **settings: Any) -> Engine:
        return Engine(single_submit=True, overlap_events=False, **settings)


class TestUnderShortTransfers(EngineConformance):
    @pytest.fixture(autouse=True)
    def _backend(self, backend: str) -> None:
        self.backend = backend

    def make_engine(self, **settings: Any) -> Engine:
        return faulty_engine(
            Shorten(every=3, fraction=0.4), Shorten(every=5, fraction=0.77), backend=self.backend, **settings
        )


class TestUnderReorderedAndLateCompletions(EngineConformance):
    @pytest.fixture(autouse=True)
    def _backend(self, backend: str) -> None:
        self.backend = backend

    def make_engine(self, **settings: Any) -> Engine:
        return faulty_engine(Reorder(seed=3), Delay(every=7, seconds=0.001), backend=self.backend, **settings)

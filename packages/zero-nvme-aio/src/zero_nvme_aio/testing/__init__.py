"""For people who test code on top of this package, or write a backend or engine of their own.

`faulty_engine` gives an engine whose transfers go wrong as planned; `EngineConformance` holds the behaviour that every
engine owes its users.
"""

from __future__ import annotations

from ._conformance import EngineConformance
from ._faults import Delay, Fail, Fault, FaultyEngine, Reorder, Shorten, faulty_engine

__all__ = ["Delay", "EngineConformance", "Fail", "Fault", "FaultyEngine", "Reorder", "Shorten", "faulty_engine"]

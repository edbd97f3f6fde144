"""Reading the file of `--config`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import PlanError


def read_configuration(path: str) -> dict[str, Any]:
    """Return the content of the configuration file ``path``. Raises `PlanError` unless it is a JSON object."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PlanError(f"--config {path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise PlanError(f"--config {path}: expected a JSON object, got {type(found).__name__}")
    return found

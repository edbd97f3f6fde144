"""Colours of one lane can be told apart with any colour vision, and lines stand out from their ground."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import zero_report

# Simulations of full deficiency in linear RGB: Machado, Oliveira and Fernandes, 2009, table for severity 1.0.
VISIONS = {
    "usual": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
LANES = (("data", "forward", "backward", "update"), ("gather", "reduce", "control"))
MARKS = (*LANES[0], *LANES[1], "publish", "tier", "save", "compute", "other")
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = TO_XYZ @ np.ones(3)


def themes() -> dict[str, dict[str, str]]:
    style = (Path(zero_report.__file__).parent / "page" / "assets" / "page.css").read_text()
    blocks = {"light": style.split("}")[0], "dark": style.split("}")[1]}
    return {name: dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block)) for name, block in blocks.items()}


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    x, y, z = np.cbrt(np.clip(TO_XYZ @ rgb, 1e-4, None) / WHITE)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_kinds_of_one_lane_differ(theme: str, vision: str) -> None:
    colours = themes()[theme]
    for lane in LANES:
        for one, other in combinations(lane, 2):
            a, b = (lab(np.clip(VISIONS[vision] @ linear(colours[name]), 0, 1)) for name in (one, other))
            assert np.linalg.norm(a - b) >= 12, (one, other)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_marks_have_a_contrast_of_three_at_least_and_text_of_four_and_a_half(theme: str) -> None:
    colours = themes()[theme]
    ground = (TO_XYZ @ linear(colours["ground"]))[1]
    for name in MARKS:
        light = (TO_XYZ @ linear(colours[name]))[1]
        assert (max(light, ground) + 0.05) / (min(light, ground) + 0.05) >= 3, name
    for name in ("ink", "quiet", "accent", "bad"):
        light = (TO_XYZ @ linear(colours[name]))[1]
        assert (max(light, ground) + 0.05) / (min(light, ground) + 0.05) >= 4.5, name

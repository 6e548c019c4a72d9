"""Colours stand out against the page, and differ from each other for everybody: contrast by WCAG 2,
colour blindness by Machado, Oliveira and Fernandes (2009), distance in CIE Lab.
"""

from __future__ import annotations

import itertools
import re
from importlib import resources

import numpy as np
import pytest
from numpy.typing import NDArray

STRATEGIES = [f"c{number}" for number in range(8)]
PHASES = ["compute", "padded", "encode", "waiting", "transfer"]
TEXT, GRAPHICS = 4.5, 3.0
JUST_NOTICEABLE = 2.3

SEEN_BY = {
    "everybody": np.eye(3),
    "protanopes": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopes": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.01182, 0.04294, 0.968881],
    ],
    "tritanopes": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.3039],
    ],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = TO_XYZ.sum(axis=1)


def palettes() -> dict[str, dict[str, str]]:
    style = (resources.files("offbeat_lab.report") / "assets" / "report.css").read_text()
    light, dark, *_ = (
        dict(re.findall(r"--([\w-]+): (#\w{6})", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.S)
    )
    return {"light": light, "dark": light | dark}


PALETTES = palettes()


def linear(colour: str) -> NDArray[np.float64]:
    channels = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    darker, lighter = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (a, b))
    return (lighter + 0.05) / (darker + 0.05)


def lab(light: NDArray[np.float64]) -> NDArray[np.float64]:
    ratio = TO_XYZ @ light / WHITE
    x, y, z = np.where(ratio > 0.008856, np.cbrt(ratio), 7.787 * ratio + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("scheme", PALETTES)
def test_text_can_be_read(scheme: str) -> None:
    colours = PALETTES[scheme]
    for ink, ground in itertools.product(["ink", "muted", "good"], ["page", "soft"]):
        assert contrast(colours[ink], colours[ground]) >= TEXT, (ink, ground)
    assert contrast(colours["warn"], colours["warn-page"]) >= TEXT


@pytest.mark.parametrize("scheme", PALETTES)
def test_lines_and_bars_stand_out(scheme: str) -> None:
    colours = PALETTES[scheme]
    assert [
        name for name in STRATEGIES + PHASES if contrast(colours[name], colours["page"]) < GRAPHICS
    ] == []


@pytest.mark.parametrize("scheme", PALETTES)
@pytest.mark.parametrize("eyes", SEEN_BY)
@pytest.mark.parametrize("group", [STRATEGIES, PHASES], ids=["strategies", "phases"])
def test_no_two_colours_look_alike(scheme: str, eyes: str, group: list[str]) -> None:
    seen = {
        name: lab(np.clip(np.array(SEEN_BY[eyes]) @ linear(PALETTES[scheme][name]), 0, 1))
        for name in group
    }
    for a, b in itertools.combinations(group, 2):
        assert np.linalg.norm(seen[a] - seen[b]) > 4 * JUST_NOTICEABLE, (a, b)


@pytest.mark.parametrize("scheme", PALETTES)
def test_no_phase_has_the_colour_of_a_strategy(scheme: str) -> None:
    seen = {name: lab(linear(PALETTES[scheme][name])) for name in STRATEGIES + PHASES}
    for phase, strategy in itertools.product(PHASES, STRATEGIES):
        assert np.linalg.norm(seen[phase] - seen[strategy]) > 10 * JUST_NOTICEABLE, phase

"""A picture of who works when: the rows of a fleet and the updates of a learner over time, as SVG."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

import numpy as np

from jaxrl_llm.diagnostics.charts import PHASES

__all__ = ["Panel", "timeline_svg"]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One schedule."""

    title: str
    slots: int
    rows: list[tuple[float, int]]  # from this second on so many rows run; the last entry ends the picture
    learned: list[tuple[float, float]]  # begin and end of each update, seconds


_COLORS = dict(PHASES)
_LEFT, _WIDTH, _RIGHT = 80, 800, 20  # pixels
_TOP, _FLEET, _GAP, _LEARNER, _BELOW = 34, 80, 6, 16, 34
_HEIGHT = _TOP + _FLEET + _GAP + _LEARNER + _BELOW


def timeline_svg(panels: Sequence[Panel], note: str = "") -> str:
    """Panels below each other on one scale of time, each from its own beginning."""
    span = max((p.rows[-1][0] - p.rows[0][0] for p in panels), default=0.0) or 1.0
    height = _HEIGHT * len(panels) + (24 if note else 0)
    width = _LEFT + _WIDTH + _RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#334155">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, panel in enumerate(panels):
        parts.append(f'<g transform="translate({_LEFT},{index * _HEIGHT})">')
        parts += _drawn(panel, span)
        parts.append("</g>")
    if note:
        parts.append(f'<text x="{_LEFT}" y="{height - 8}">{html.escape(note)}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _drawn(panel: Panel, span: float) -> list[str]:
    begin, end = panel.rows[0][0], panel.rows[-1][0]
    scale = _WIDTH / span
    shown = (end - begin) * scale
    base, strip = _TOP + _FLEET, _TOP + _FLEET + _GAP
    parts = [
        f'<text x="0" y="{_TOP - 12}" font-size="14" font-weight="600">{html.escape(panel.title)}</text>',
        f'<text x="-8" y="{_TOP + _FLEET / 2}" text-anchor="end">rows</text>',
        f'<text x="-8" y="{strip + _LEARNER - 4}" text-anchor="end">learner</text>',
    ]
    for y, size in ((_TOP, _FLEET), (strip, _LEARNER)):
        parts.append(f'<rect x="0" y="{y}" width="{shown:.1f}" height="{size}" fill="#e2e8f0"/>')
    edges = np.arange(math.ceil(shown)) if shown >= 1 else np.zeros(1)
    heights = _FLEET * _mean_rows(panel.rows, begin + np.append(edges, shown) / scale) / panel.slots
    path = f"M0,{base}" + "".join(
        f"V{base - height:.1f}H{min(edge + 1, shown):.1f}"
        for edge, height in zip(edges, heights, strict=True)
    )
    parts.append(f'<path d="{path}V{base}Z" fill="{_COLORS["rollout"]}"/>')
    for start, stop in panel.learned:
        x, wide = (start - begin) * scale, (stop - start) * scale
        parts.append(
            f'<rect x="{x:.1f}" y="{strip}" width="{max(wide, 0.5):.1f}" height="{_LEARNER}" '
            f'fill="{_COLORS["update"]}" stroke="white" stroke-width="0.5"/>'
        )
    bottom = strip + _LEARNER
    for tick in _ticks(span):
        x = tick * scale
        parts.append(f'<path d="M{x:.1f},{bottom}v4" stroke="#94a3b8"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" font-size="10">{tick:g} s</text>'
        )
    return parts


def _mean_rows(rows: Sequence[tuple[float, int]], edges: np.ndarray) -> np.ndarray:
    """Mean number of rows between each two of the times f64[N + 1], f64[N]."""
    times = np.array([time for time, _ in rows])
    running = np.array([number for _, number in rows], np.float64)
    total = np.concatenate([[0.0], np.cumsum(np.diff(times) * running[:-1])])
    last = np.flatnonzero(
        np.append(np.diff(times) > 0, True)
    )  # of each time, so that the integral is a function of it
    at = np.interp(edges, times[last], total[last])
    return np.diff(at) / np.maximum(np.diff(edges), 1e-300)


def _ticks(span: float) -> list[float]:
    """Round times from 0 up to `span`, about six."""
    rough = span / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(m for m in (1, 2, 5, 10) if m * unit >= rough * 0.999)
    return [i * step for i in range(int(span / step) + 1)]

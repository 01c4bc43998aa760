"""A page of HTML with a report's figures and plots; nothing in it is loaded from elsewhere."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:52rem;margin:2rem auto;padding:0 1rem;color:#1d1d1f;"
    "background:#fff}table{border-collapse:collapse}td,th{padding:.25rem .8rem;border-bottom:1px solid #ddd;"
    "text-align:right}td:first-child,th:first-child{text-align:left}svg{width:100%;height:auto}"
    "text{font:12px system-ui,sans-serif;fill:currentColor}figcaption{color:#666}"
    "@media(prefers-color-scheme:dark){body{background:#16181c;color:#e6e6e6}td,th{border-color:#333}}"
)
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 760, 260, 64, 34, 10
COLOUR = "#3f7cac"


def make_page(
    title: str, rows: Sequence[tuple[str, ...]], plots: Sequence[tuple[str, str]], notes: Sequence[str]
) -> str:
    """Put a table (its first row the titles) and plots with their captions on a page."""
    head, *body = rows
    table = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    figures = "".join(
        f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>" for caption, svg in plots
    )
    text = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        '<meta name="viewport" content="width=device-width"><meta http-equiv="Content-Security-Policy" '
        f"content=\"default-src 'none'; style-src 'unsafe-inline'\"><style>{STYLE}</style>"
        f"<h1>{html.escape(title)}</h1><table><tr>{table}</tr>{cells}</table>{text}{figures}</html>\n"
    )


def plot_line(points: Sequence[tuple[float, float]], x_title: str, y_title: str) -> str:
    """Draw y over x with a logarithmic y axis."""
    floor = 1e-7
    logs = [(x, math.log10(max(y, floor))) for x, y in points]
    low = math.floor(min(y for _, y in logs))
    high = max(low + 1, math.ceil(max(y for _, y in logs)))
    first, last = logs[0][0], max(logs[-1][0], logs[0][0] + 1e-9)

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (x - first) / (last - first) * (WIDTH - LEFT - 10),
            TOP + (high - y) / (high - low) * (HEIGHT - TOP - BOTTOM),
        )

    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (place(x, y) for x, y in logs))
    ticks = [(f"1e{power}", place(first, power)[1]) for power in range(low, high + 1)]
    marks = [(f"{first + (last - first) * i / 4:g}", place(first + (last - first) * i / 4, low)[0]) for i in range(5)]
    line = f'<polyline points="{path}" fill="none" stroke="{COLOUR}" stroke-width="2"/>'
    return _frame(line, ticks, marks, x_title, y_title)


def plot_bars(values: Sequence[tuple[str, float]], x_title: str, y_title: str) -> str:
    """Draw a bar for each named value."""
    most = max((value for _, value in values), default=0.0) or 1.0
    room = (WIDTH - LEFT - 10) / max(1, len(values))
    bars, marks = [], []
    every = max(1, len(values) // 16)
    for index, (name, value) in enumerate(values):
        tall = max(0.0, value) / most * (HEIGHT - TOP - BOTTOM)
        x = LEFT + index * room
        bars.append(
            f'<rect x="{x + 0.1 * room:.1f}" y="{HEIGHT - BOTTOM - tall:.1f}" width="{0.8 * room:.1f}" '
            f'height="{tall:.1f}" fill="{COLOUR}"><title>{html.escape(name)}: {value:.4g}</title></rect>'
        )
        if index % every == 0:
            marks.append((name, x + room / 2))
    ticks = [(f"{most * i / 4:.3g}", TOP + (4 - i) / 4 * (HEIGHT - TOP - BOTTOM)) for i in range(5)]
    return _frame("".join(bars), ticks, marks, x_title, y_title)


def _frame(
    inner: str, ticks: Sequence[tuple[str, float]], marks: Sequence[tuple[str, float]], x_title: str, y_title: str
) -> str:
    lines = "".join(
        f'<line x1="{LEFT}" x2="{WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity=".15"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{html.escape(text)}</text>'
        for text, y in ticks
    )
    names = "".join(
        f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{html.escape(text)}</text>'
        for text, x in marks
    )
    middle = (HEIGHT - BOTTOM) / 2
    titles = (
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 3}" text-anchor="middle">{html.escape(x_title)}</text>'
        f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{html.escape(y_title)}</text>'
    )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{lines}{names}{titles}{inner}</svg>'

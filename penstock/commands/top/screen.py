"""Draw a look at a server for a terminal of any size."""

from __future__ import annotations

import textwrap
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.commands.ps import readable_seconds
from penstock.commands.top.feed import Look
from penstock.hub.download_errors import readable_bytes

SPARKS = "▁▂▃▄▅▆▇█"
MAX_RATES = 240  # kept for the curve: two minutes
NARROW, MEDIUM, WIDE = 60, 96, 124  # columns from which more is shown
STATES = {
    "prefill": "yellow",
    "decode": "green",
    "queued": "bright_black",
    "preempted": "red",
    "grammar": "magenta",
    "restart": "red",
}
BLOCKS = (("held", "cyan", "█"), ("shared", "magenta", "▓"), ("cached", "blue", "▒"), ("free", "bright_black", "·"))
Row = dict[str, Any]


@dataclass
class Screen:
    """The last look, and what is kept of those before."""

    url: str
    look: Look | None = None
    trouble: str = ""  # why there is no newer look
    rates: dict[str, deque[float]] = field(default_factory=dict)  # tokens per second, by model

    def take(self, look: Look) -> None:
        self.look, self.trouble = look, ""
        names = {model["name"] for model in look["models"]}
        self.rates = {name: rates for name, rates in self.rates.items() if name in names}
        for model in look["models"]:
            rate = (model.get("rates") or {}).get("generation_tokens_per_s")
            self.rates.setdefault(model["name"], deque(maxlen=MAX_RATES)).append(rate or 0.0)

    def render(self, width: int, height: int | None = None) -> RenderableType:
        """Draw in so many columns; without a height all rows are shown."""
        head = self._head(width)
        parts: list[RenderableType] = [*head]
        models = [] if self.look is None else self.look["models"]
        left = None if height is None else max(0, height - len(head) - 1)
        for number, model in enumerate(models):
            summary = self._summarize(model, width)
            rows = model["rows"]
            if left is not None:
                left -= len(summary) + 1
                after = 3 * len(models[number + 1 :])
                rows = rows[: max(0, left - after - 2)]
                left -= len(rows) + 2 if rows else 0
            parts += ["", *summary]
            if rows:
                parts.append(_list_rows(rows, width))
            if (more := model["num_rows"] - len(rows)) > 0:
                parts.append(_cut(Text(f"and {more} more", "bright_black"), width))
        return Group(*parts)

    def _head(self, width: int) -> list[Text]:
        clock = "" if self.look is None else time.strftime("%H:%M:%S", time.localtime(self.look["time"]))
        head = Text.assemble(("penstock top", "bold"), "  ", clean(self.url), "  ", (clock, "bright_black"))
        below = [Text(line, "bold red") for line in textwrap.wrap(clean(self.trouble), width)]
        if self.look is None and not below:
            below = [Text("connecting", "bright_black")]
        return [_cut(line, width) for line in (head, *below)]

    def _summarize(self, model: dict[str, Any], width: int) -> list[Text]:
        state = str(model["state"])
        title = Text.assemble((clean(model["name"]), "bold"), "  ", (clean(state), _colour_state(state)))
        if model["restarts"]:
            title.append(f"  {model['restarts']} restart{'s' * (model['restarts'] > 1)}", "red")
        if (age := model.get("age_s")) is not None and age > 1.5:
            title.append(f"  in a step for {age:.0f} s", "yellow")
        lines = [title]
        if model.get("rates"):
            lines.append(_format_rates(model["rates"], width, list(self.rates.get(model["name"], ()))))
        if model.get("blocks"):
            lines += _draw_pool(model["blocks"], width)
        for one in model.get("replicas", ()):
            lines += [_format_replica(one), *_format_ranks(one)]
        lines += _format_ranks(model)
        if model["queue"]:
            lines.append(_format_queue(model["queue"]))
        return [_cut(line, width) for line in lines]


def clean(text: object) -> str:
    """Replace what a terminal would obey or not show."""
    return "".join(char if char.isprintable() else "�" for char in str(text))


def _cut(text: Text, width: int) -> Text:
    text.no_wrap = True
    text.truncate(width, overflow="ellipsis")
    return text


def _colour_state(state: str) -> str:
    if state.startswith("failed"):
        return "red"
    return "green" if state == "ready" else "bright_black" if state == "unloaded" else "yellow"


def _format_rates(rates: dict[str, Any], width: int, kept: Sequence[float]) -> Text:
    shown = [
        ("out", rates["generation_tokens_per_s"], "{:.1f} tok/s".format),
        ("in", rates["prompt_tokens_per_s"], "{:.1f} tok/s".format),
        ("TTFT", rates["ttft_ms"], _format_ms),
        ("TPOT", rates["tpot_ms"], _format_ms),
        ("hits", None if rates["hit_rate"] is None else 100 * rates["hit_rate"], "{:.0f} %".format),
        ("step", rates["step_ms"], _format_ms),
    ]
    line = Text()
    for title, value, form in shown if width >= NARROW else [shown[0], shown[2], shown[3]]:
        line.append(f"{title} ", "bright_black")
        line.append("–  " if value is None else form(value) + "  ")
    room = min(MAX_RATES, width - line.cell_len)
    if room >= 10:
        line.append(draw_sparks(kept[-room:]), "green")
    return line


def _format_ms(value: float) -> str:
    return f"{value:.1f} ms" if value < 100 else f"{value:.0f} ms" if value < 1000 else f"{value / 1e3:.1f} s"


def draw_sparks(values: Sequence[float]) -> str:
    """Draw a curve, a character per value."""
    top = max(values, default=0.0)
    return "".join(SPARKS[round(value / top * (len(SPARKS) - 1))] if top > 0 else SPARKS[0] for value in values)


def _draw_pool(blocks: dict[str, Any], width: int) -> list[Text]:
    bar = Text.assemble(("blocks ", "bright_black"))
    room, num = max(4, width - 7), max(1, blocks["num"])
    for (_, colour, char), length in zip(BLOCKS, share_out([blocks[name] for name, _, _ in BLOCKS], room, num)):
        bar.append(char * length, colour)
    legend = Text()
    for name, colour, char in BLOCKS:
        legend.append(f"{char} ", colour)
        legend.append(f"{name} {blocks[name]}  ")
    legend.append(f"of {blocks['num']} · {blocks['evicted']} evicted so far", "bright_black")
    return [bar, legend]


def share_out(counts: Sequence[int], room: int, num: int) -> list[int]:
    """Share `room` cells out by counts that sum to `num`; what is there at all gets a cell if there is room."""
    cells = [max(int(count > 0), count * room // num) for count in counts]
    while sum(cells) > room and max(cells) > 1:
        cells[cells.index(max(cells))] -= 1
    while sum(cells) < room and any(counts):
        short = [count * room / num - cell if count else -room for count, cell in zip(counts, cells)]
        cells[short.index(max(short))] += 1
    return cells


def _format_replica(replica: dict[str, Any]) -> Text:
    state = str(replica["state"])
    line = Text.assemble((f"replica {replica['replica']}  ", "bright_black"), (clean(state), _colour_state(state)))
    hits = 100 * replica["cached_tokens"] / replica["prompt_tokens"] if replica["prompt_tokens"] else 0
    if replica.get("role", "both") != "both":
        line.append(f"  for {'prompts' if replica['role'] == 'prefill' else 'answers'}")
    line.append(f"  {replica['rows']} row{'s' * (replica['rows'] != 1)}  {hits:.0f} % hits")
    line.append(f"  {replica['used_blocks']} of {replica['blocks']} blocks", "bright_black")
    if replica["restarts"]:
        line.append(f"  {replica['restarts']} restart{'s' * (replica['restarts'] > 1)}", "red")
    return line


def _format_ranks(engine: dict[str, Any]) -> list[Text]:
    """Draw a line per rank of an engine that has several, and one for the last that was lost."""
    lines = [_format_rank(one) for one in engine.get("ranks", ())]
    if lost := engine.get("lost_rank"):
        at, back = (time.strftime("%H:%M:%S", time.localtime(lost[name] or 0)) for name in ("at", "back_at"))
        line = Text.assemble((f"lost at {at}", "red"), f"  {clean(lost['why'])}  ")
        lines.append(line.append(f"back at {back}" if lost["back_at"] else "not back yet", "bright_black"))
    return lines


def _format_rank(rank: dict[str, Any]) -> Text:
    line = Text.assemble((f"rank {rank['rank']}  ", "bright_black"))
    line.append("up" if rank["is_up"] else f"silent for {rank['silence_s']:.0f} s", "green" if rank["is_up"] else "red")
    line.append(f"  layers {rank['first_layer']}–{rank['last_layer']}")
    line.append(f"  holds {readable_bytes(rank['weight_bytes'] + rank['cache_bytes'])}")
    if rank["free_bytes"] is not None:
        line.append(f", {readable_bytes(rank['free_bytes'])} free")
    return line.append(f"  process {rank['pid']} on {clean(rank['node'])}", "bright_black")


def _format_queue(queue: list[dict[str, Any]]) -> Text:
    line = Text.assemble(("queue  ", "bright_black"))
    for at, tenant in enumerate(sorted(queue, key=lambda one: -one["requests"])):
        name = f"{clean(tenant['tenant'])} " if tenant["tenant"] else ""
        line.append(", " if at else "")
        line.append(f"{name}{tenant['requests']} request{'s' * (tenant['requests'] != 1)}")
        line.append(f" ({tenant['tokens']} prompt tokens)", "bright_black")
    return line


@dataclass(frozen=True)
class Column:
    title: str
    show: Callable[[Row], Text | str]
    min_width: int = 0  # of the terminal
    is_right: bool = False


COLUMNS = (
    Column("REQUEST", lambda row: clean(row["id"]) + (f"#{row['index']}" if row["index"] else ""), WIDE),
    Column("REQUEST", lambda row: "…" + clean(row["id"])[-8:] + (f"#{row['index']}" if row["index"] else "")),
    Column("TENANT", lambda row: clean(row["tenant"])[:16], MEDIUM),
    Column("REPLICA", lambda row: str(row.get("replica", "–")), MEDIUM, True),
    Column("STATE", lambda row: Text(clean(row["state"]), STATES.get(row["state"], ""))),
    Column("PROMPT", lambda row: _draw_progress(*_prompt_progress(row)), NARROW),
    Column("CACHED", lambda row: str(row["cached_tokens"] or "–"), MEDIUM, True),
    Column("OUTPUT", lambda row: _draw_progress(row["output_tokens"], row["max_tokens"])),
    Column("DRAFTS", lambda row: _format_drafts(row), MEDIUM, True),
    Column(
        "PREEMPTED", lambda row: Text(str(row["preemptions"] or "–"), "red" if row["preemptions"] else ""), WIDE, True
    ),
    Column("AGE", lambda row: readable_seconds(row["age_s"]), NARROW, True),
)
BAR_CELLS = 8


def _list_rows(rows: Sequence[Row], width: int) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", pad_edge=False)
    shown: dict[str, Column] = {}
    for column in COLUMNS:
        if width >= column.min_width and column.title not in shown and _is_told(column, rows):
            shown[column.title] = column
    for column in shown.values():
        table.add_column(column.title, justify="right" if column.is_right else "left", no_wrap=True)
    for row in rows:
        cells = [column.show(row) for column in shown.values()]
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))  # a str would be markup
    return table


def _is_told(column: Column, rows: Sequence[Row]) -> bool:
    return column.title != "REPLICA" or any("replica" in row for row in rows)


def _prompt_progress(row: Row) -> tuple[int, int]:
    return min(row["computed_tokens"], row["prompt_tokens"]), row["prompt_tokens"]


def _draw_progress(done: int, total: int) -> Text:
    cells = min(BAR_CELLS, BAR_CELLS * done // max(1, total))
    text = Text.assemble(("━" * cells, "green"))
    text.append("─" * (BAR_CELLS - cells), "bright_black")
    text.append(f" {done}/{total}")
    return text


def _format_drafts(row: Row) -> str:
    return f"{row['accepted_tokens']}/{row['draft_tokens']}" if row["draft_tokens"] else "–"

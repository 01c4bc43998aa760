"""Rows of text in columns."""

from __future__ import annotations


class Table:
    def __init__(self, *titles: str) -> None:
        """Without titles there is no first line."""
        self._rows: list[tuple[str, ...]] = [titles] if titles else []

    def add(self, *cells: str) -> None:
        self._rows.append(cells)

    def plain(self) -> str:
        """Columns apart by two spaces, as `ls -l` would."""
        widths = self._widths()
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in self._rows]
        return "\n".join(lines) + "\n"

    def markdown(self, right: tuple[str, ...] = ()) -> str:
        """A Markdown table; the columns titled in `right` are right-aligned."""
        titles, widths = self._rows[0], self._widths()
        lines = []
        for row in self._rows:
            cells = [
                cell.rjust(width) if title in right else cell.ljust(width)
                for title, cell, width in zip(titles, row, widths)
            ]
            lines.append("| " + " | ".join(cells) + " |")
        ruler = ["-" * (width + 1) + (":" if title in right else "-") for title, width in zip(titles, widths)]
        lines.insert(1, "|" + "|".join(ruler) + "|")
        return "\n".join(lines) + "\n"

    def _widths(self) -> list[int]:
        return [max(len(row[column]) for row in self._rows) for column in range(len(self._rows[0]))]

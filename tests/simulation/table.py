"""After a test run: which suite caught which planted bug. A plugin, so that it also works with parallel workers."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "planted" and getattr(report, "when", "") == "call"
    ]
    if not rows:
        return
    terminalreporter.section("planted bugs")
    for bug, suite, test in sorted(rows, key=lambda row: (row[1], row[0])):
        terminalreporter.write_line(f"{bug:64} {suite:11} {test}")
    terminalreporter.write_line(f"{sum(row[1] != 'nobody' for row in rows)} of {len(rows)} caught")

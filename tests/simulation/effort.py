"""How hard the suites try. PENSTOCK_EFFORT=quick is for running them many times over, as the planted bugs do."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings

QUICK = os.environ.get("PENSTOCK_EFFORT") == "quick"
PHASES = (Phase.explicit, Phase.generate) if QUICK else tuple(Phase)


def effort(max_examples: int, steps: int = 50) -> settings:
    """Settings of a property: quick runs take a third of the examples and do not shrink what they find."""
    return settings(
        max_examples=max(10, max_examples // 3) if QUICK else max_examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        phases=PHASES,
        database=None,
        suppress_health_check=list(HealthCheck),
    )

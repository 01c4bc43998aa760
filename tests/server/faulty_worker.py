"""An engine process whose model fails on certain tokens of a prompt, and whose steps can be made slow."""

from __future__ import annotations

import os
import signal
import sys
import time

from penstock.api import worker
from penstock.engine.plan import Output, Plan, Result
from penstock.runner.cpu import runner as module

DEATH, RAISE, NAN = 310, 311, 312  # in no text
STEP_S = float(os.environ.get("FAULTY_STEP_S", "0"))  # added to every step


class FaultyRunner(module.Runner):
    def run(self, plan: Plan) -> Result:
        self._told = [token for admission in plan.admissions for token in admission.request.tokens]
        if DEATH in self._told:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(STEP_S)
        return super().run(plan)

    def _prepare(self, model, plan, rows, at):
        compute = super()._prepare(model, plan, rows, at)

        def faulty():
            if any(RAISE in row.state.request.tokens for row in rows):
                raise RuntimeError("a step that raises")
            computed, first = compute(), 0
            for row, running in zip(plan.rows, rows):
                if row.output is Output.SAMPLE:
                    if NAN in running.state.request.tokens:
                        computed.values[first] = float("nan")
                    first += 1 + len(row.draft)
            return computed

        return faulty


if __name__ == "__main__":
    import penstock.api.engine.start

    penstock.api.engine.start.Runner = FaultyRunner  # type: ignore[attr-defined]
    sys.exit(worker.main())

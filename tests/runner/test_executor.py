"""A runner is an executor."""

from __future__ import annotations

from pathlib import Path

from penstock.engine.executor import Describe
from penstock.engine.plan import Plan, Result
from tests.llm import tiny


class Unknown:
    """A message of another version."""


def test_a_runner_is_an_executor(tmp_path: Path) -> None:
    with tiny.dummy(tiny.write_config(tmp_path)) as llm:
        engine = llm.service.engine
        llm.generate([[3, 4, 5]], use_tqdm=False)
        values = engine.control(Describe()).values
        assert values["device"] == "cpu" and values["num_plans"] == llm.stats()["num_steps"]
        assert int(values["cache_bytes"]) > 2048
        error = engine.control(Unknown()).error
        assert error == "control message Unknown is unknown to this executor: send Describe"


def test_a_result_says_how_long_the_device_took(tmp_path: Path) -> None:
    results: list[Result] = []
    with tiny.dummy(tiny.write_config(tmp_path)) as llm:
        runner = tiny.runner(llm.service)
        run = runner.run

        def noting(plan: Plan) -> Result:
            results.append(run(plan))
            return results[-1]

        runner.run = noting  # type: ignore[method-assign]
        llm.generate([[3, 4, 5]], use_tqdm=False)
    assert len(results) > 3
    assert all(one.step_s > 0 and abs(one.step_s - one.forward_s - one.sampling_s) < 1e-9 for one in results)

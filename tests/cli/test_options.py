from __future__ import annotations

import json
import subprocess
import sys

SCRIPT = """
import gc, json, sys
from penstock.cli import main
status = main(["run", sys.argv[1], "Once", "--max-tokens=1", "--load-format=dummy", "--threads=1"])
print("\\n" + json.dumps([status, gc.isenabled(), gc.get_freeze_count()]))
"""


def test_the_collector_leaves_out_what_was_loaded_first(plain_model: str) -> None:
    """And works on afterwards, whether or not the model could be loaded."""
    for model, expected in ((plain_model, 0), ("./nowhere", 1)):
        done = subprocess.run([sys.executable, "-c", SCRIPT, model], capture_output=True, text=True, timeout=120)
        status, enabled, num_frozen = json.loads(done.stdout.splitlines()[-1])
        assert (status, enabled) == (expected, True) and num_frozen > 100_000

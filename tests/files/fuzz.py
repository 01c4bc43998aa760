"""Mutated checkpoints by the thousand: each is refused with our error or runs one step, and nothing else happens.

    python tests/files/fuzz.py --count 1000000 --seed 7
    python tests/files/fuzz.py --only 4711          # one file again, with its traceback

Workers are processes with a limit on their address space; one that dies or takes too long over a file is a failure, and
a new one goes on with the next file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

TIMEOUT_S = 60.0  # for one file, on a busy machine
SPACE_BYTES = 2 << 30  # that a file may make the process grow by
START_S = 120.0  # until a worker has imported everything


def run_step(path: Path, whole_context: bool, packed: bool = False) -> None:
    """What a user's first request does: open, describe, load (widened, or `packed` as stored), three tokens through the
    model, and the tokenizer."""
    import torch

    from penstock.cache.group import group_layers
    from penstock.models.decoder import Encoder
    from penstock.models.files import open_checkpoint
    from penstock.models.load import load_model
    from penstock.models.spec import spec_from_config
    from penstock.runner.memory import BlockMemory
    from penstock.runner.step import Step

    checkpoint = open_checkpoint(path)
    try:
        spec = spec_from_config(checkpoint.config, None if whole_context else 8)
        model = load_model(checkpoint, spec, dtype=None if packed else torch.float32)
        ids = torch.tensor([0, spec.vocab_size // 2, spec.vocab_size - 1])
        count = min(3, spec.max_model_len)
        bounds = torch.tensor([0, count], dtype=torch.int32)
        step = Step(
            ids[:count],
            torch.arange(count),
            [torch.arange(count)],
            [torch.zeros(1, 1, dtype=torch.int32)],
            bounds,
            bounds[1:],
        )
        caches = [
            BlockMemory(1, 8, group_layers([state], 8), "float32").views([memory])[0]
            for state, memory in zip(spec.states(), spec.memories())
        ]
        hidden = model.forward(step, caches)
        if isinstance(model, Encoder):
            result = model.pool(hidden, bounds)
        else:
            result = model.logits(hidden, torch.tensor([count - 1]))
        assert result.shape[-1] == (spec.width if spec.is_encoder else spec.vocab_size)
        source = checkpoint.tokenizer_source()
        if not isinstance(source, Path) and "tokenizer.ggml.model" in source:
            _tokenize(source)
    finally:
        checkpoint.close()


def _tokenize(source: Mapping[str, Any]) -> None:
    from penstock.text.tokenizers.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source)
    ids = tokenizer.encode("abc def<|im_end|> a\n")
    assert isinstance(tokenizer.decode(ids), str) and isinstance(tokenizer.token_text(3), str)
    if tokenizer.chat_template is not None:
        tokenizer.apply_chat_template([{"role": "user", "content": "abc"}])


class Folder:
    """The seeds, and a place to write one mutated checkpoint after the other."""

    def __init__(self, seeds: Path, work: Path) -> None:
        self.work = work
        self.seeds = {
            path.name: {file.name: file.read_bytes() for file in sorted(path.iterdir())}
            for path in sorted(seeds.iterdir())
        }
        # GGUF files are as many as folders; those with blocks of 256 are large and come less often.
        large = ("gguf-superblocks", "gguf-grids")
        kinds = {"gguf": 4, "quantized": 5}
        self.weights = [1 if name in large else kinds.get(name.partition("-")[0], 7) for name in self.seeds]

    def write(self, index: int, seed: int) -> tuple[Path, str, str, bool]:
        """Mutation `index`: where it lies, its seed's name, what was done, whether to the structure."""
        from mutate import mutate_folder, mutate_gguf

        rng = Random(f"{seed}:{index}")
        name = rng.choices(list(self.seeds), self.weights)[0]
        healthy = self.seeds[name]
        shutil.rmtree(self.work, ignore_errors=True)  # new files: old ones may still be mapped
        self.work.mkdir()
        if name.startswith("gguf-"):
            part = rng.choice(list(healthy))
            content, label, structural = mutate_gguf(healthy[part], rng)
            for file, whole in healthy.items():
                (self.work / file).write_bytes(content if file == part else whole)
            return self.work / rng.choice(list(healthy)), name, label, structural
        changed, label, structural = mutate_folder(healthy, rng)
        for file, content in {**healthy, **changed}.items():
            if content is not None:
                (self.work / file).write_bytes(content)
        return self.work, name, label, structural


def sabotage(kind: str) -> None:
    """What a reader without checks would do; for the test that the fuzz notices."""
    if kind == "crash":
        os.abort()
    if kind == "hang":
        time.sleep(3600)
    if kind == "memory":
        bytearray(SPACE_BYTES)
    if kind == "error":
        raise KeyError(kind)


def check(folder: Folder, index: int, seed: int, planted: str = "") -> dict[str, Any]:
    """The outcome of one file: accepted, refused, or failed with the reason."""
    from penstock.errors import PenstockError

    path, name, label, structural = folder.write(index, seed)
    result = {"index": index, "seed": name, "label": label, "structural": structural}
    try:
        sabotage(planted)
        run_step(path, whole_context=index % 8 == 0, packed=index % 2 == 0)
        return result | {"outcome": "accepted"}
    except PenstockError as error:
        one_line = "\n" not in str(error) and 0 < len(str(error)) < 2000
        return result | ({"outcome": "refused"} if one_line else {"outcome": "failed", "reason": f"message: {error}"})
    except BaseException:
        return result | {"outcome": "failed", "reason": traceback.format_exc(limit=-6)}


def prepare() -> None:
    """Imports before the limit is set, so that it counts only what files take."""
    import torch

    import penstock.models.families  # noqa: F401
    import penstock.models.files  # noqa: F401
    import penstock.models.load  # noqa: F401
    import penstock.text.tokenizers.tokenizer  # noqa: F401

    torch.set_num_threads(1)


def work(seeds: Path, first: int, count: int, stride: int, seed: int, planted: list[str]) -> None:
    prepare()
    space = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") + SPACE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (space, space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folder = Folder(seeds, seeds.parent / f"work-{os.getpid()}")
    print("ready", flush=True)
    for index in range(first, count, stride):
        plant = planted[index] if index < len(planted) else ""
        print(json.dumps(check(folder, index, seed, plant)), flush=True)


class Worker:
    """A process that checks every `stride`-th file, restarted after the one it died or hung on."""

    def __init__(self, seeds: Path, first: int, stride: int, options: argparse.Namespace) -> None:
        self.stride, self.count, self.next, self.timeout_s = stride, options.count, first, options.timeout
        self.arguments = [
            "--worker",
            str(seeds),
            "--stride",
            str(stride),
            "--count",
            str(options.count),
            "--seed",
            str(options.seed),
            "--planted",
            options.planted,
        ]
        self.start()

    def start(self) -> None:
        command = [sys.executable, __file__, *self.arguments, "--first", str(self.next)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=os.environ | {"PYTHONFAULTHANDLER": "1"},
        )
        self.buffer = b""
        self.deadline = time.monotonic() + START_S

    def results(self) -> list[dict[str, Any]]:
        """What has come since the last call; a death is a result too."""
        assert self.process.stdout
        chunk = os.read(self.process.stdout.fileno(), 1 << 16)
        if not chunk:
            return [self.dead("crash")] if self.next < self.count else []
        *lines, self.buffer = (self.buffer + chunk).split(b"\n")
        self.deadline = time.monotonic() + self.timeout_s
        found = [json.loads(line) for line in lines if line != b"ready"]
        self.next = found[-1]["index"] + self.stride if found else self.next
        return found

    def dead(self, outcome: str) -> dict[str, Any]:
        """Ends the process, starts another one behind the file it had, and says what happened to that file."""
        self.process.kill()
        errors = self.process.communicate()[1].decode(errors="replace")[-3000:]
        index, self.next = self.next, self.next + self.stride
        if self.next < self.count:
            self.start()
        return {"index": index, "seed": "?", "label": "?", "structural": True, "outcome": outcome, "reason": errors}

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


def fuzz(options: argparse.Namespace) -> dict[str, Any]:
    """Checks the files and returns how many had which outcome, and every failure."""
    from seeds import write_seeds
    from tqdm import tqdm

    place = Path(tempfile.mkdtemp(prefix="penstock-fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    count, num_workers = options.count, options.workers
    outcomes: Counter[str] = Counter()
    by_seed: dict[str, Counter[str]] = {}
    failures: list[dict[str, Any]] = []
    structural = 0
    try:
        (place / "seeds").mkdir()
        write_seeds(place / "seeds")
        workers = [Worker(place / "seeds", first, num_workers, options) for first in range(num_workers)]
        with tqdm(total=count, unit="file", disable=options.json) as bar:
            while any(worker.next < count for worker in workers):
                for result in _gather(workers):
                    outcomes[result["outcome"]] += 1
                    by_seed.setdefault(result["seed"], Counter())[result["outcome"]] += 1
                    structural += result["structural"]
                    bar.update()
                    if result["outcome"] not in ("accepted", "refused"):
                        failures.append(result)
                        bar.write(f"file {result['index']}: {result['outcome']}", file=sys.stderr)
        for worker in workers:
            worker.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return {
        "count": count,
        "seed": options.seed,
        "structural": structural,
        **outcomes,
        "by_seed": {name: dict(each) for name, each in sorted(by_seed.items())},
        "failures": failures,
    }


def _gather(workers: list[Worker]) -> list[dict[str, Any]]:
    """Waits until some worker has something to say or has been silent for too long."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            if worker.next < worker.count:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)  # type: ignore[arg-type]
        ready = [key.data for key, _ in selector.select(1.0)]
    found = [result for worker in ready for result in worker.results()]
    late = [
        worker
        for worker in workers
        if worker not in ready and worker.next < worker.count and time.monotonic() > worker.deadline
    ]
    return found + [worker.dead("hang") for worker in late]


def only(index: int, seed: int) -> None:
    from seeds import write_seeds

    with tempfile.TemporaryDirectory() as place:
        seeds = Path(place) / "seeds"
        seeds.mkdir()
        write_seeds(seeds)
        prepare()
        path, name, label, _ = Folder(seeds, Path(place) / "work").write(index, seed)
        print(f"file {index}: {name}, {label}", flush=True)
        run_step(path, whole_context=index % 8 == 0, packed=index % 2 == 0)
        print("accepted")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=20_000, help="files to make (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the mutations (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    parser.add_argument("--only", type=int, metavar="INDEX", help="run this one file here and show what happens")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for one file (default: %(default)s)")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--stride", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--planted", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return work(
            options.worker, options.first, options.count, options.stride, options.seed, options.planted.split(",")
        )
    if options.only is not None:
        return only(options.only, options.seed)
    summary = fuzz(options)
    if options.json:
        print(json.dumps(summary))
    else:
        print(
            f"{summary['count']} files: {summary.get('accepted', 0)} ran a step, {summary.get('refused', 0)} were "
            f"refused, {len(summary['failures'])} failed; {summary['structural']} had their structure damaged"
        )
        for failure in summary["failures"][:20]:
            print(f"\nfile {failure['index']} ({failure['seed']}, {failure['label']}): {failure['reason']}")
    sys.exit(1 if summary["failures"] else 0)


if __name__ == "__main__":
    main()

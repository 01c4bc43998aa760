"""Budgets of size that can only shrink: files, functions, parameters, methods, folders and command-line flags."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "penstock"

# kind → what a thing of it may have, and what to do with one that has more
BUDGETS = {
    "lines of a file": (400, "split the file along a noun"),
    "lines of a function": (60, "split the function into steps that have names"),
    "parameters of a function": (8, "group those that travel together in a dataclass"),
    "methods of a class": (20, "give a part of the class a class of its own"),
    "files of a folder": (14, "give some of them a folder of their own"),
    "lines of a source": (400, "split the file along a noun"),
}
UNLIMITED_FOLDERS = ("penstock/models/families",)  # one module per family
SOURCES = (".cpp", ".h", ".js", ".css", ".html")  # of the kernels and of the page

# Things that are over a budget, with the number they have today. Numbers only become smaller, and no entry is added.
EXCEPTIONS: dict[str, dict[str, int]] = {
    "lines of a file": {},
    "lines of a function": {
        "penstock/ops/triton/attention/attention.py::_body": 97,
        "penstock/ops/triton/attention/attention.py::_decode": 86,
        "penstock/ops/triton/attention/attention.py::_shared_prefix": 89,
        "penstock/ops/triton/attention/prefill.py::_prefill": 91,
        "penstock/ops/triton/attention/qkv_attention.py::_body": 84,
        "penstock/ops/triton/attention/qkv_attention.py::_fused_decode": 95,
        "penstock/ops/triton/attention/qkv_write.py::_qkv_write": 75,
        "penstock/ops/triton/exact/attention.py::_body": 78,
        "penstock/ops/triton/exact/attention.py::_exact_attention": 108,
        "penstock/ops/triton/matmul/int_gemv.py::run_int_gemv": 90,
        "penstock/ops/triton/matmul/product.py::_gemv": 63,
        "penstock/ops/triton/sampling/cut.py::cut": 66,
        "penstock/ops/triton/sampling/report.py::_report": 78,
        "penstock/ops/triton/sampling/sample.py::_body": 172,
        "penstock/ops/triton/sampling/sample.py::_draw": 62,
        "penstock/ops/triton/sampling/samplers.py::RareSamplers.before_cut": 67,
    },
    "parameters of a function": {
        "penstock/api/llm.py::LLM.chat": 10,
        "penstock/layers/attention.py::Attention.__init__": 11,
        "penstock/models/families/parts.py::attention": 12,
        "penstock/models/families/parts.py::model": 10,
        "penstock/models/load.py::load_model": 9,
    },
    "methods of a class": {"penstock/api/llm.py::LLM": 26, "penstock/cache/radix.py::RadixCache": 24},
    "files of a folder": {"bench": 48, "penstock/ops/cpu/csrc": 18, "penstock/ops/cpu/csrc/attention": 16},
}

ENGINE_FLAGS = """
    --activation-dtype --block-size --capacity --chat-template --deterministic --device --dtype --enable-prefix-caching
    --enforce-eager --generation-config --gpu-memory-utilization --kv-cache-dtype --kv-cache-tokens --load-format
    --max-model-len --max-num-batched-tokens --max-num-seqs --override-generation-config --parse-special-tokens
    --quantization --revision --scheduling-policy --seed --threads --tokenizer
"""

# command → its flags as `--help` lists them, without --help
FLAGS = {
    "": "--version",
    "bench latency": ENGINE_FLAGS + "--json --output-tokens --prompt-tokens --repetitions --skip-tokenizer-init",
    "bench throughput": ENGINE_FLAGS
    + "--json --num-prompts --output-tokens --prompt-tokens --repetitions --skip-tokenizer-init",
    "chat": ENGINE_FLAGS + "--max-tokens --system --temperature --verbose",
    "info": "--json",
    "list": "--json",
    "perplexity": ENGINE_FLAGS + "--json --max-tokens --stride --window",
    "ps": "--api-key --json",
    "pull": "--revision",
    "rm": "",
    "run": ENGINE_FLAGS + "--json --max-tokens --system --temperature",
    "run-batch": ENGINE_FLAGS + "--model --output",
    "serve": """
        --access-log --admin-key --admin-key-file --allow-delete --allowed-hosts --allowed-origins --api-key
        --api-key-file --config --data-folder --hang-timeout --host --keep-alive --log-format --max-body-mb
        --max-files-mb --max-queued-requests --max-queued-tokens --memory-budget-gb --model --port --public-prefix
        --reasoning-parser --request-timeout --served-model-name --shutdown-timeout --ssl-certfile --ssl-keyfile
        --tool-call-parser --trust-request-chat-template --unknown-fields
    """,
    "stop": "--timeout",
}

# "command --flag" → why it is a flag and not a default that is right for everybody; every later flag is listed here
ADDED_FLAGS: dict[str, str] = {
    "plan --data-parallel-size": "replicas divide a device's memory, so what fits depends on their number",
    "route --max-queued-requests": "how long a queue may get before 429 is the operator's choice, as it is of a server",
    "route --max-upstream-requests": "another maker's server does not tell how many requests it runs at once",
    "quantize --scheme": "what is to be made is the user's choice, and has no default that fits",
    "quantize --method": "slower methods keep more quality, and which one depends on the model",
    "quantize --group-size": "smaller groups keep more and take more bytes; other programs read some sizes only",
    "quantize --act-order": "it helps some models and costs others, so it is measured by trying",
    "quantize --sparsity": "zeros cost quality, and only some hardware gains by them",
    "quantize --prune": "each way to choose zeros costs something else: time, memory or quality",
    "quantize --calibration": "a model with one purpose is best calibrated on text of that purpose",
    "quantize --speed": "measuring speed loads both models whole, which may not fit where one block does",
    "quantize --json": "scripts read the report as a document, as of other commands",
    "quality --text": "what counts is the text that the model will meet",
    "quality --max-tokens": "a longer text costs time and narrows the errors",
    "quality --html": "a page is a file that not everybody wants",
    "quality --speed": "measuring speed loads both models, which may not fit",
    "quality --json": "scripts read the report as a document, as of other commands",
    **{
        f"{command} --speculative-config": "speculative decoding needs a switch, and vLLM's scripts set it by this name"
        for command in ("bench latency", "bench throughput", "chat", "perplexity", "run", "run-batch")
    },
    "serve --kv-transfer-port": "which port other servers may reach depends on the network between them",
    "serve --data-parallel-size": "how many engines share a machine depends on its cores and on the load",
    **{
        f"route --{flag}": "a router is a server on the net: the same flags as of serve, with the same meaning"
        for flag in """
            host port api-key api-key-file admin-key admin-key-file allowed-hosts allowed-origins ssl-certfile
            ssl-keyfile max-body-mb max-files-mb shutdown-timeout access-log log-format router-key-file
        """.split()
    },
    "route --upstream-api-key-file": "servers may have a key that clients do not know",
    "route --upstream-ca-file": "servers inside a cluster have certificates of the cluster's own",
    "route --policy": "other servers' caches may not be worth following, and rules are compared by trying",
    "route --heartbeat-s": "how soon a dead server is noticed, against the requests that this costs",
    "route --hang-timeout": "a server in a long pause is dead for one operator and slow for another",
    **{
        f"serve --{flag}": "vLLM's flags: clients and proxies that expect what they do cannot be told otherwise"
        for flag in ("root-path", "enable-force-include-usage", "return-tokens-as-token-ids")
    },
    **{
        f"serve --{flag}": "prompts are private, so logging them has to be asked for; vLLM's flags"
        for flag in ("enable-log-requests", "max-log-len")
    },
    "serve --router-key-file": "a server must tell its router from clients that say they are one",
    "serve --tpot-slo-ms": "how long an answer may stall for another's prompt is the operator's choice",
    "serve --ttft-slo-ms": "how long a first token may take, and when to refuse instead, is the operator's choice",
    **{
        f"{command} --{flag}": "run and chat take every sampling parameter and form of the answer that requests do"
        for command in ("run", "chat")
        for flag in """
            top-p top-k min-p repetition-penalty presence-penalty frequency-penalty stop min-tokens ignore-eos bad-words
            thinking-token-budget typical-p repeat-last-n dry-multiplier dry-base dry-allowed-length dry-penalty-last-n
            xtc-probability xtc-threshold top-n-sigma dynatemp-range dynatemp-exponent mirostat mirostat-tau
            mirostat-eta json-schema json-object regex grammar choice
        """.split()
    },
    **{
        f"top --{flag}": "the live view asks one server, as ps does, and scripts and pipes take one look"
        for flag in ("url", "api-key", "once", "json")
    },
    **{
        f"serve --kv-offloading-{name}": "how much memory and disk old prefixes may fill, and where, is the operator's"
        for name in ("size", "path", "disk-size")
    },
    "serve --role": "which engines compute prompts and which answer depends on the load that is expected",
    **{
        f"{command} --{flag}": "a model may take several processes wherever it takes one, and these are vLLM's flags"
        for command in ("bench latency", "bench throughput", "chat", "perplexity", "plan", "run", "run-batch", "serve")
        for flag in """
            tensor-parallel-size pipeline-parallel-size enable-expert-parallel distributed-executor-backend
        """.split()
        if (command, flag) != ("plan", "distributed-executor-backend")
        and not (command == "serve" and flag in ("enable-expert-parallel", "distributed-executor-backend"))
    },
    **{
        f"{command} --kv-cache-dtype-skip-layers": "which layers lose by a quantized cache depends on the model"
        for command in (
            *("bench latency", "bench speculation", "bench throughput", "chat", "perplexity"),
            *("plan", "run", "run-batch", "tune", "verify"),
        )
    },
    **{
        f"{command} --cpu-offload-gb": "how much of the host's memory a GPU's model may take is the operator's"
        for command in (
            *("bench latency", "bench speculation", "bench throughput", "chat", "perplexity"),
            *("plan", "run", "run-batch", "tune", "verify"),
        )
    },
    "serve --nnodes": "how many machines share a model nobody but the operator knows",
    **{
        f"info --{flag}": "what each rank will hold is shown before anything is loaded"
        for flag in ("tensor-parallel-size", "pipeline-parallel-size", "enable-expert-parallel")
    },
    "info --cpu-offload-gb": "what a GPU and its host will hold is shown before anything is loaded",
    "merge --scale": "an adapter's strength is the user's choice, as in requests",
    "serve --otlp-traces-endpoint": "the collector's address is the operator's, and vLLM's flag has this name",
    "chat --markdown": "who copies an answer's source wants it as it is",
    **{
        f"{command} --help-all": "help fits a screen, so what is rare is explained on demand"
        for command in (
            *("bench latency", "bench speculation", "bench throughput", "chat", "perplexity"),
            *("route", "run", "run-batch", "serve"),
        )
    },
    **{
        f"serve --{flag}": "adapters, their number and their rank are limits of memory, and vLLM's flags"
        for flag in ("enable-lora", "max-loras", "max-lora-rank", "max-cpu-loras", "lora-modules")
    },
    **{
        f"bench speculation {flag}": "the command takes what the other benchmarks take"
        for flag in f"{ENGINE_FLAGS} --json --repetitions --skip-tokenizer-init --speculative-config".split()
    },
    **{
        f"verify {flag}": "what is verified is the engine with the options that it will run with"
        for flag in f"{ENGINE_FLAGS} --json --skip-tokenizer-init --help-all".split()
        if flag not in ("--capacity", "--chat-template", "--parse-special-tokens", "--scheduling-policy")
    },
    **{
        f"tune {flag}": "a search is for an aim, a workload, and the engine with the options that stay"
        for flag in f"""
            {ENGINE_FLAGS} --json --help-all --aim --concurrency --prompt-tokens --output-tokens --trials --repeats
            --speculative-config
        """.split()
        if flag not in ("--tokenizer", "--chat-template", "--parse-special-tokens", "--generation-config")
    },
    **{
        f"plan --{flag}": "a forecast is for a machine, a load and the engine's options that change either"
        for flag in """
            gpu memory context concurrency prompt-tokens output-tokens bandwidth tflops json help-all revision
            load-format gpu-memory-utilization enforce-eager deterministic dtype quantization activation-dtype
            kv-cache-dtype max-num-seqs max-num-batched-tokens block-size threads
        """.split()
    },
}


def functions(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Every function and class under `node`, with its name from the file on."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield f"{scope}{child.name}", child
            yield from functions(child, f"{scope}{child.name}.")
        else:
            yield from functions(child, scope)


def is_kernel_or_op(name: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True for a Triton or Gluon kernel, an op's definition and its bodies: their parameters are the op's."""
    decorators = " ".join(ast.unparse(decorator) for decorator in function.decorator_list)
    return name.startswith("penstock/ops/") and (".jit" in decorators or "op(" in decorators or ".impl(" in decorators)


@cache
def measure() -> dict[str, dict[str, int]]:
    """Return every number that has a budget: kind → name → number."""
    found: dict[str, dict[str, int]] = {kind: {} for kind in BUDGETS}
    for path in (*PACKAGE.rglob("*.*"), *(ROOT / "bench").rglob("*.*")):
        if path.suffix in (".py", ".svg", *SOURCES) and path.name != "__init__.py":
            folder = path.parent.relative_to(ROOT).as_posix()
            files = found["files of a folder"]
            files[folder] = files.get(folder, 0) + (folder not in UNLIMITED_FOLDERS)
        if path.suffix in SOURCES:
            found["lines of a source"][path.relative_to(ROOT).as_posix()] = len(path.read_text().splitlines())
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        text = path.read_text()
        found["lines of a file"][name] = len(text.splitlines())
        for scope, node in functions(ast.parse(text), f"{name}::"):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
                found["methods of a class"][scope] = methods
                continue
            lines = node.end_lineno - node.lineno + 1 if node.end_lineno else 0
            longest = found["lines of a function"]
            longest[scope] = max(longest.get(scope, 0), lines)
            if not is_kernel_or_op(name, node):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                parameters = [argument for argument in given if argument.arg not in ("self", "cls")]
                most = found["parameters of a function"]
                most[scope] = max(most.get(scope, 0), len(parameters))
    return found


def complaints(kind: str, numbers: dict[str, int], listed: dict[str, int]) -> Iterator[str]:
    """Say of each number that is not as `listed` and the kind's budget have it what to do about it."""
    limit, remedy = BUDGETS[kind]
    for name, number in numbers.items():
        if number > max(limit, listed.get(name, 0)):
            yield f"{name}: {number} {kind}, and {listed.get(name, limit)} is the limit: {remedy}"
        elif name in listed and number < listed[name]:
            todo = f"shrink the entry to {number}" if number > limit else "remove the entry"
            yield f"{name}: {number} {kind}, and {listed[name]} is listed: well done, {todo}"
    yield from (f"{name}: it is gone, remove the entry ({kind})" for name in listed if name not in numbers)


@pytest.mark.parametrize("kind", BUDGETS)
def test_nothing_outgrows_its_budget(kind: str) -> None:
    found = list(complaints(kind, measure()[kind], EXCEPTIONS.get(kind, {})))
    assert not found, f"tests/test_shape.py has EXCEPTIONS[{kind!r}]:\n" + "\n".join(found)


def test_numbers_that_grow_or_shrink_are_noticed() -> None:
    kind, listed = "methods of a class", {"big": 25, "gone": 30, "mended": 22}
    numbers = {"small": 20, "big": 25, "mended": 22}
    assert len(list(complaints(kind, numbers, {"big": 25, "mended": 22}))) == 0
    found = "\n".join(complaints(kind, {"small": 21, "big": 24, "mended": 20}, listed))
    assert "small: 21" in found and "shrink the entry to 24" in found
    assert found.count("remove the entry") == 2 and len(found.splitlines()) == 4
    assert "25 is the limit" in "".join(complaints(kind, {"big": 26}, {"big": 25}))


def test_flags_are_those_listed() -> None:
    from typer.main import get_command

    from penstock.cli import app

    def commands(command: object, name: str) -> Iterator[tuple[str, set[str]]]:
        params = getattr(command, "params", [])
        shown = [param for param in params if param.param_type_name == "option" and not param.hidden]
        yield name, {next(option for option in param.opts if option.startswith("--")) for param in shown}
        for part, inner in getattr(command, "commands", {}).items():
            yield from commands(inner, f"{name} {part}".strip())

    found = {f"{name} {flag}".strip() for name, flags in commands(get_command(app), "") for flag in flags}
    listed = {f"{name} {flag}".strip() for name, flags in FLAGS.items() for flag in flags.split()}
    assert not (new := found - listed - set(ADDED_FLAGS)), (
        f"new flags: give each its reason in ADDED_FLAGS: {sorted(new)}"
    )
    assert not (gone := (listed | set(ADDED_FLAGS)) - found), f"flags that users have had are gone: {sorted(gone)}"
    for flag, reason in ADDED_FLAGS.items():
        assert len(reason.split()) > 3, f"say why {flag} is needed"

"""Live traffic against servers that follow a script: what is sent, what is counted, and what the lines say."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_serving, serving
from bench.gpu_sets import SHAPES
from bench.live import cases, plot
from bench.live.clients import Clients, Post, Report
from bench.live.folder import write_folder, write_tokenizer
from bench.live.options import parse, settings
from bench.live.report import table
from bench.live.server import OwnServer
from bench.live.traffic import Size, Traffic
from bench.load.figures import Limits
from bench.load.trial import ServerFailed
from bench.load.wire import Target
from penstock.models.spec import FAMILIES
from tests.bench.chat_server import Answer, Body, ChatServer, Script
from tests.bench.samples import made

Row = dict[str, Any]
SMALL = ("--scale", "0.05", "--clients", "1", "--model", "m")


def faithful(_: int, body: Body) -> Answer:
    return Answer(body["max_tokens"])


def measure(folder: Path, script: Script, *words: str, status: int = 0) -> tuple[dict[str, Row], ChatServer]:
    output = folder / "lines.jsonl"
    with ChatServer(script) as server:
        assert gpu_serving.main(["--url", server.url, "--output", str(output), *SMALL, *words]) == status
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    return {row["case"]: row for row in rows}, server


# -- what is sent


def test_every_case_gives_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, server = measure(tmp_path, faithful, "--seconds", "4")
    assert list(rows) == [cases.READY, *cases.CASES]
    said = capsys.readouterr()
    assert [json.loads(line) for line in said.out.splitlines()] == list(rows.values())
    assert "first-sizes" in said.err and "rate-28" in said.err
    for name in cases.CASES:
        assert rows[name]["num_ok"] == rows[name]["num_requests"] > 0 and rows[name]["errors"] == {}
    assert sum(row.get("num_requests", 0) for row in rows.values()) == len(server.bodies)
    assert rows["first-sizes"]["fresh"] and not rows["first-32-after-64"]["fresh"]


def test_requests_are_streams_of_new_token_ids(tmp_path: Path) -> None:
    words = ["--case", "burst-256x1024-128", "--vocabulary", "5000", "--api-key", "secret", "--extra", '{"top_k": 3}']
    rows, server = measure(tmp_path, faithful, *words)
    assert len(server.bodies) == 2 * 13 == rows["burst-256x1024-128"]["num_requests"]
    for body in server.bodies:
        assert len(body["prompt"]) == 51 and all(1000 <= token < 5000 for token in body["prompt"])
        assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["top_k"]) == (6, True, True, 3)
        assert body["stream_options"] == {"include_usage": True} and body["temperature"] == 1.0
    assert len({tuple(body["prompt"]) for body in server.bodies}) == len(server.bodies)
    assert all("Authorization: Bearer secret\r\n" in head for head in server.heads)
    assert "secret" not in json.dumps(rows)
    _, greedy = measure(tmp_path / "greedy", faithful, "--case", "one", "--greedy")
    assert {body["temperature"] for body in greedy.bodies} == {0.0}


def test_sizes_come_twice_and_in_order(tmp_path: Path) -> None:
    rows, server = measure(tmp_path, faithful, "--case", "first-sizes", "--scale", "0.5")
    sizes = rows["first-sizes"]["sizes"]
    assert list(sizes) == ["2", "6", "12", "24", "48", "100"]  # halves of 3 and 5 are one size
    assert rows["first-sizes"]["num_requests"] == 1 + 2 * sum(map(int, sizes)) == len(server.bodies)
    shares = [row["out_tok_s"] / row["again_out_tok_s"] for row in sizes.values()]
    assert [row["first_share"] for row in sizes.values()] == pytest.approx(shares, rel=0.05)
    assert rows["first-sizes"]["first_share"] == min(row["first_share"] for row in sizes.values())


def test_arrivals_are_the_same_in_every_run_and_prompts_are_not() -> None:
    posts: list[list[Post]] = []

    class Noting(Clients):
        def send(self, target: Target, given: Sequence[Post], timeout_s: float) -> Report:
            posts.append(list(given))
            return super().send(target, given, timeout_s)

    with ChatServer(faithful) as server, Noting(1) as clients:
        for _ in range(2):
            Traffic(clients, Target.parse(server.url), "m").poisson(Size(8, 4, 2), 400, Limits())
    first, again = posts
    assert [post.due_s for post in first] == [post.due_s for post in again]
    assert first[0].due_s == 0.0 and first[-1].due_s > 0.0
    assert not {post.request for post in first} & {post.request for post in again}


def test_clients_share_the_posts_in_turn() -> None:
    with ChatServer(lambda index, body: Answer(body["max_tokens"])) as server, Clients(2) as clients:
        target = Target.parse(server.url)
        posts = [
            Post(0.0, target.request("POST", "/v1/completions", json.dumps(body).encode()), number)
            for number in range(2, 7)
            for body in [{"prompt": [1], "max_tokens": number, "stream_options": {"include_usage": True}}]
        ]
        report = clients.send(target, posts, 20.0)
        alone = clients.send(target, posts[:1], 20.0)
    assert [sample.num_output for sample in report.samples] == [2, 3, 4, 5, 6]
    assert [sample.index for sample in report.samples] == [0, 1, 2, 3, 4]
    assert [sample.outcome for sample in [*report.samples, *alone.samples]] == ["ok"] * 6


# -- what is counted


class Recorded(Clients):
    """Answers of four requests with times of our choosing."""

    def send(self, target: Target, posts: Sequence[Post], timeout_s: float) -> Report:
        """TTFT is 10, 20, 30 and 40 ms, TPOT 1, 2, 3 and 4 ms; the last stream is cut."""
        samples = [made(0.0, n / 100, n / 100 + n / 100, 11, index=n - 1) for n in range(1, 5)]
        samples.append(made(0.0, 0.001, 0.002, 2, outcome="disconnected", error="cut"))
        return Report(samples, 0.25)


def test_latencies_and_goodput_of_a_rate() -> None:
    traffic = Traffic(Recorded(1), Target.parse("http://127.0.0.1:1"), "m")
    aims = {"both": (30.0, 2.5), "ttft": (10.5, None), "neither": (None, None)}
    rows = {name: cases.poisson(5)(traffic, cases.Settings(seconds=1, aims_ms=given)) for name, given in aims.items()}
    row = rows["both"]
    assert (row["num_requests"], row["num_ok"], row["num_disconnected"], row["rate"]) == (5, 4, 1, 5)
    assert (row["ttft_p50_ms"], row["ttft_p99_ms"]) == (25.0, 39.7)
    assert (row["tpot_p50_ms"], row["tpot_p99_ms"]) == (2.5, 3.97)
    assert row["out_tok_s"] == pytest.approx(44 / 0.08) and row["requests_s"] == 50.0
    assert (row["goodput"], row["ttft_slo_ms"], row["tpot_slo_ms"]) == (0.4, 30.0, 2.5)  # two of five
    assert (rows["ttft"]["goodput"], rows["ttft"]["tpot_slo_ms"]) == (0.2, None)
    assert "goodput" not in rows["neither"]


def test_aims_belong_to_rates(tmp_path: Path) -> None:
    assert set(cases.AIMS_MS) == set(cases.RATES)
    rows, _ = measure(tmp_path, faithful, "--case", "rate-28", "--case", "rate-40", "--seconds", "1")
    assert (rows["rate-28"]["ttft_slo_ms"], rows["rate-28"]["tpot_slo_ms"]) == (350, 32)
    assert "goodput" not in rows["rate-40"]


def test_what_is_not_answered_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answers = {
        0: Answer(0, status=503),
        1: Answer(9, cut_after=3),
        2: Answer(9, error_after=2),
        3: Answer(9, usage=4),
        4: Answer(9, usage=None),
    }

    def script(index: int, body: Body) -> Answer:
        return answers.get(index) or faithful(index, body)

    words = ["--case", "burst-256x128-512", "--rounds", "1", "--scale", "0.04"]
    rows, _ = measure(tmp_path, script, *words, status=1)
    row = rows["burst-256x128-512"]
    assert (row["num_requests"], row["num_ok"], row["num_refused"]) == (10, 5, 1)
    assert (row["num_disconnected"], row["num_failed"], row["num_wrong_length"]) == (1, 1, 2)
    assert row["errors"] == {"503": 1, "disconnected": 1, "failed": 1, "wrong length": 2}
    assert row["first_error"]
    assert "5 of 10 requests are not in the speeds and latencies" in capsys.readouterr().err


def test_a_server_that_answers_nothing_well_gives_lines_all_the_same(tmp_path: Path) -> None:
    rows, _ = measure(tmp_path, lambda *_: Answer(0, status=500), "--seconds", "2", status=1)
    assert list(rows) == [cases.READY, *cases.CASES]
    assert all(rows[name]["num_ok"] == 0 and rows[name]["num_failed"] for name in cases.CASES)
    assert rows["rate-10"]["goodput"] == 0.0 and rows["one"]["out_tok_s"] is None


def test_nobody_there_is_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert gpu_serving.main(["--url", url, *SMALL, "--start-timeout", "0.2"]) == 1
    assert "is not ready after 0.2 s" in capsys.readouterr().err


def test_goodput_of_the_other_benchmark_takes_the_same_aims(tmp_path: Path) -> None:
    output = tmp_path / "one.json"
    with ChatServer(faithful) as server:
        words = ["--url", server.url, "--pause", "0", "--requests", "2", "--output-len", "3", "--output", str(output)]
        assert serving.main([*words, "--ttft-slo-ms", "60000", "--tpot-slo-ms", "0.5"]) == 0
    goodput = json.loads(output.read_text())["phases"][0]["figures"]["goodput"]
    assert (goodput["ttft_limit_s"], goodput["tpot_limit_s"]) == (60.0, 0.0005)


# -- our own server


def test_the_folder_is_one_that_penstock_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started, measured and started again for the second case that wants a fresh server."""
    tiny = {
        "architectures": ["LlamaForCausalLM"],
        **FAMILIES["LlamaForCausalLM"].like[0],
        "vocab_size": 4000,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    monkeypatch.setitem(SHAPES, "tiny", tiny)
    options = "--threads 1 --kv-cache-tokens 4096"
    output = tmp_path / "lines.jsonl"
    words = ["--shape", "tiny", "--device", "cpu", "--serve-options", options, "--vocabulary", "4000"]
    words += ["--scale", "0.02", "--clients", "1", "--output", str(output), "--log", str(tmp_path / "log")]
    chosen = [word for name in ("ready", "first-32-after-64", "first-sizes") for word in ("--case", name)]
    assert gpu_serving.main([*words, *chosen]) == 0
    rows = {row["case"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert rows["ready"]["ready_s"] > 0 and rows["ready"]["server"] == "penstock"
    assert rows["first-32-after-64"]["fresh"] and rows["first-sizes"]["fresh"]
    assert ("restarted_s" in rows["first-32-after-64"]) != ("restarted_s" in rows["first-sizes"])
    assert rows["first-sizes"]["num_ok"] == rows["first-sizes"]["num_requests"]


def test_a_server_that_does_not_start_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.live.server.write_folder", lambda shape, folder: None)
    server = OwnServer("llama-3.1-8b", ["--no-such-flag"], 30.0)
    with pytest.raises(ServerFailed, match="no-such-flag"):
        server.start()
    server.close()


def test_every_id_of_a_made_up_tokenizer_has_a_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_folder("qwen3-0.6b", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == SHAPES["qwen3-0.6b"]
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert made.get_vocab_size() == 151936
    assert made.decode(made.encode("a penstock").ids) == "a penstock"
    texts = [made.id_to_token(token) for token in (0, 1, 2, 1000, 151935)]
    assert texts[1:3] == ["<s>", "</s>"] and None not in texts
    with pytest.raises(ValueError, match="cannot be made"):
        write_tokenizer(tmp_path / "large.json", 1_000_000)


# -- options, table and picture


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--case", "rate-0"], "choose from ready"),
        (["--url", "http://h"], "--url needs --model"),
        (["--scale", "0"], "must be more than 0"),
        (["--plot", "a.png"], "go together"),
        (["--plot", "a.txt", "b.jsonl"], ".svg or .png"),
        (["--output", "/dev/null"], "two runs are never mixed"),
    ],
)
def test_options_out_of_range_are_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(words)
    assert says in capsys.readouterr().err


def test_quick_is_shorter_and_fresh_cases_come_first() -> None:
    quick, full = settings(parse(["--quick"])), settings(parse([]))
    assert (quick.seconds, full.seconds) == (20.0, 60.0) and quick.num_rounds < full.num_rounds
    assert settings(parse(["--quick", "--seconds", "5"])).seconds == 5
    given = parse(["--case", "one", "--case", "first-sizes", "--case", "ready"])
    assert given.cases == ["ready", "first-sizes", "one"]


def line(server: str, rate: float, ttft_ms: float) -> Row:
    latencies = {f"{name}_{part}_ms": ttft_ms for name in ("ttft", "tpot") for part in ("p50", "p99")}
    return {"case": f"rate-{rate:g}", "server": server, "model": "m", "rate": rate, **latencies}


def test_the_table_says_what_went_wrong() -> None:
    counts = {"num_requests": 4, "num_ok": 3, "errors": {"timeout": 1}, "first_error": "timeout, status None: timeout"}
    row = {**line("a", 10, 12.5), **counts, "client_busy": 0.9, "cached_tokens": 5, "goodput": 0.5}
    text = table([{"case": "ready", "ready_s": 7.25}, row])
    for words in ("7.2 s", "12.5", "50.0%", "1 of 4 requests", "timeout: 1", "raise --clients", "5 prompt tokens"):
        assert words in text, words


def test_a_picture_of_latencies_by_rate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line("a", 20, 9.0), line("a", 10, 3.0), line("b", 10, 5.0), {"case": "one", "server": "a", "model": "m"}]
    results = tmp_path / "lines.jsonl"
    results.write_text("".join(json.dumps(row) + "\n" for row in [*lines, line("a", 20, 7.0)]))
    found = plot.curves(plot.read([results]))
    assert {name: [(row["rate"], row["ttft_p99_ms"]) for row in own] for name, own in found.items()} == {
        "a, m": [(10, 3.0), (20, 7.0)],
        "b, m": [(10, 5.0)],
    }
    pytest.importorskip("matplotlib")
    assert gpu_serving.main(["--plot", str(tmp_path / "one.svg"), str(results)]) == 0
    text = (tmp_path / "one.svg").read_text()
    assert all(words in text for words in ("TTFT, ms", "TPOT, ms", "a, m, p50", "b, m, p99"))
    results.write_text(json.dumps(lines[-1]) + "\n")
    assert gpu_serving.main(["--plot", str(tmp_path / "two.svg"), str(results)]) == 1
    assert "no line has a rate" in capsys.readouterr().err

"""The load client against servers that follow a script, and its arithmetic on made-up samples."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from bench import serving
from bench.load.figures import Limits, percentile, spread, summarize
from bench.load.loop import Pace
from bench.load.stream import read_sample
from bench.load.trial import ServerFailed, calibrate, offered_rate
from bench.load.wire import Target
from bench.load.workload import WORKLOADS
from tests.bench.chat_server import Answer, Body, ChatServer, Script
from tests.bench.samples import made

Document = dict[str, Any]
EXAMPLE = Path(serving.__file__).parent / "servers.example.toml"


def faithful(_: int, body: Body) -> Answer:
    return Answer(body["max_tokens"])


def after_warm_up(script: Script) -> Script:
    """The first request is the warm-up; the script counts from the second."""
    return lambda index, body: faithful(index, body) if index == 0 else script(index - 1, body)


def measure(folder: Path, script: Script, *words: str, status: int = 0, **options: Any) -> tuple[Document, ChatServer]:
    output = folder / "result.json"
    with ChatServer(after_warm_up(script), **options) as server:
        assert serving.main(["--url", server.url, "--output", str(output), "--pause", "0", *words]) == status
    found: Document = json.loads(output.read_text())
    return found, server


# -- what is sent


def test_a_burst_has_one_system_prompt_and_many_questions(tmp_path: Path) -> None:
    document, server = measure(tmp_path, faithful, "--api-key", "secret", "--extra", '{"top_k": 1}')
    burst = server.bodies[1:]
    assert len(burst) == 16 and document["phases"][0]["figures"]["num_ok"] == 16
    assert len({body["messages"][0]["content"] for body in burst}) == 1
    assert len({body["messages"][1]["content"] for body in burst}) == 16
    assert server.bodies[0]["messages"][0] != burst[0]["messages"][0]  # the warm-up gives nothing away
    for body in burst:
        assert (body["max_tokens"], body["ignore_eos"], body["stream"], body["top_k"]) == (64, True, True, 1)
        assert body["stream_options"] == {"include_usage": True} and body["temperature"] == 0
    assert all("Authorization: Bearer secret\r\n" in head for head in server.heads)
    assert "secret" not in json.dumps(document)


def test_a_prefix_seen_before_has_been_sent_with_another_question(tmp_path: Path) -> None:
    _, server = measure(tmp_path, faithful, "--workload", "burst-seen-prefix", "--seen", "2", "--output-len", "9")
    seen, burst = server.bodies[1:3], server.bodies[3:]
    assert len(burst) == 16 and {body["max_tokens"] for body in burst} == {9}
    assert {body["messages"][0]["content"] for body in seen} == {burst[0]["messages"][0]["content"]}
    questions = [body["messages"][1]["content"] for body in server.bodies[1:]]
    assert len(set(questions)) == 18


def test_prompts_come_from_seed_and_nonce_alone() -> None:
    workload = WORKLOADS["burst-new-prefix"]
    first, again, other = (workload.chats(seed) for seed in ("a/0", "a/0", "b/0"))
    assert first == again
    prefix, new = (chats[0].messages[0]["content"] for chats in (first, other))
    assert prefix.split()[0] != new.split()[0]  # different from the first word on
    assert 500 < len(prefix.split()) < 600  # words of about 600 tokens
    alone = WORKLOADS["independent"].chats("a/0")
    assert len({chat.messages[0]["content"].split()[0] for chat in alone}) == 64
    assert all(len(chat.messages) == 1 for chat in alone)


def test_lengths_follow_the_servers_tokenizer(tmp_path: Path) -> None:
    """Two tokens to a word: half as many words are sent."""
    document, server = measure(tmp_path, faithful, "--requests", "2", tokenize=lambda text: 2 * len(text.split()))
    assert (document["tokens_per_word"], document["calibrated"]) == (2.0, True)
    assert len(server.bodies[-1]["messages"][0]["content"].split()) == 301  # and the mark at the start
    with ChatServer(faithful) as server:
        assert calibrate(Target.parse(server.url), "m") is None


def test_a_closed_loop_never_has_more_than_its_number_at_once(tmp_path: Path) -> None:
    _, server = measure(
        tmp_path,
        lambda index, body: Answer(body["max_tokens"], first_s=0.02),
        "--workload",
        "independent",
        "--requests",
        "9",
        "--concurrency",
        "3",
        "--output-len",
        "2",
        "--input-len",
        "4",
    )
    assert len(server.bodies) == 10 and server.num_most == 3


def test_an_open_loop_does_not_wait_for_answers(tmp_path: Path) -> None:
    document, server = measure(
        tmp_path,
        lambda index, body: Answer(body["max_tokens"], first_s=0.3),
        "--workload",
        "independent",
        "--requests",
        "6",
        "--rate",
        "500",
        "--arrival",
        "uniform",
        "--output-len",
        "2",
        "--input-len",
        "4",
    )
    assert server.num_most == 6
    [phase] = document["phases"]
    assert (phase["rate"], phase["arrival"], phase["concurrency"]) == (500.0, "uniform", None)
    begins = [sample["begin_s"] for sample in phase["samples"]]
    assert begins == pytest.approx([index / 500 for index in range(6)])  # when due, not when sent


def test_arrivals_have_the_rate_asked_for() -> None:
    assert Pace(rate=4.0, arrival="uniform").due_times(3) == [0.0, 0.25, 0.5]
    poisson = Pace(rate=4.0, seed="s").due_times(4001)
    assert poisson == Pace(rate=4.0, seed="s").due_times(4001) != Pace(rate=4.0, seed="t").due_times(4001)
    assert 4000 / poisson[-1] == pytest.approx(4.0, rel=0.1)
    gaps = [later - earlier for earlier, later in zip(poisson, poisson[1:])]
    assert sum(gap > 0.25 for gap in gaps) / 4000 == pytest.approx(0.368, abs=0.04)  # 1/e


# -- what comes back


class Recorded:
    """An exchange whose arrivals are given."""

    def __init__(
        self, *arrivals: tuple[float, bytes], begin: float = 10.0, sent: float | None = None, failure: str | None = None
    ) -> None:
        self.arrivals, self.begin, self.failure = list(arrivals), begin, failure
        self.sent = begin if sent is None else sent


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(*events: Body | str) -> bytes:
    data = b"".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode() for event in events)
    return b"%x\r\n%s\r\n" % (len(data), data)


def text(content: str) -> Body:
    return {"choices": [{"delta": {"content": content}}]}


FINISH: Body = {"choices": [{"delta": {}, "finish_reason": "length"}]}
USAGE: Body = {
    "choices": [],
    "usage": {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 3}},
}
END = chunk("[DONE]") + b"0\r\n\r\n"


def test_times_of_a_stream() -> None:
    """The role is no token; what follows the last text counts neither as a gap nor, after the finish, as time."""
    exchange = Recorded(
        (11.0, HEAD + chunk(text(""))),
        (12.0, chunk(text("a"))),
        (12.5, chunk(text("b"), text("c"))),
        (14.0, chunk(text("d"))),
        (15.0, chunk(FINISH)),
        (19.0, chunk(USAGE) + END),
        sent=10.5,
    )
    sample = read_sample(exchange, 3, 8.0, 4)  # type: ignore[arg-type]
    assert (sample.index, sample.outcome, sample.status) == (3, "ok", 200)
    assert (sample.begin_s, sample.late_s) == (2.0, 0.5)
    assert (sample.first_s, sample.last_s) == (2.0, 5.0)
    assert sample.gaps_s == [0.5, 0.0, 1.5]
    assert sample.tpot_s == 1.0  # 3 s for the 3 tokens after the first
    assert (sample.num_output, sample.num_prompt, sample.num_cached) == (4, 5, 3)


def test_an_event_counts_from_its_last_byte() -> None:
    whole = HEAD + chunk(text("a"), text("b"), text("c"), text("d"), FINISH, USAGE) + END
    cut = len(HEAD) + 20
    sample = read_sample(Recorded((11.0, whole[:cut]), (13.0, whole[cut:])), 0, 10.0, 4)  # type: ignore[arg-type]
    assert (sample.outcome, sample.first_s, sample.gaps_s) == ("ok", 3.0, [0.0, 0.0, 0.0])
    byte_by_byte = Recorded(*((11.0 + number, whole[number : number + 1]) for number in range(len(whole))))
    slow = read_sample(byte_by_byte, 0, 10.0, 4)  # type: ignore[arg-type]
    assert slow.outcome == "ok" and slow.num_output == 4 and len(slow.gaps_s) == 3


@pytest.mark.parametrize("chunked", [True, False])
def test_order_of_times_from_a_real_socket(tmp_path: Path, chunked: bool) -> None:
    document, _ = measure(
        tmp_path,
        lambda index, body: Answer(body["max_tokens"], first_s=0.05, delay_s=0.03, chunked=chunked, num_cached=6),
        "--requests",
        "2",
        "--output-len",
        "5",
    )
    [phase] = document["phases"]
    for sample in phase["samples"]:
        assert 0.05 <= sample["first_s"] < sample["last_s"] and len(sample["gaps_s"]) == 4
        assert sample["tpot_s"] == pytest.approx((sample["last_s"] - sample["first_s"]) / 4)
    figures = phase["figures"]
    assert figures["prompt_tokens"]["mean"] == 7 and figures["cached_tokens"]["mean"] == 6
    assert figures["duration_s"] >= max(sample["last_s"] for sample in phase["samples"])
    assert figures["output_tokens_per_s"] == pytest.approx(10 / figures["duration_s"])


@pytest.mark.parametrize(("usage", "says"), [(3, "3 tokens came, 8 were asked for"), (None, "no usage came")])
def test_wrong_lengths_are_in_no_figure_and_the_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], usage: int | None, says: str
) -> None:
    document, _ = measure(
        tmp_path, lambda index, body: Answer(8, usage=usage if index % 4 == 0 else -1), "--output-len", "8", status=1
    )
    figures = document["phases"][0]["figures"]
    assert (figures["num_ok"], figures["num_wrong_length"], figures["num_output_tokens"]) == (12, 4, 96)
    assert figures["errors"] == {"wrong length": 4} and figures["ttft_s"]["count"] == 12
    out = capsys.readouterr().out
    assert "4 answers have another length than asked for" in out and says in out


def test_refusals_are_counted_with_their_latency_and_retry_after(tmp_path: Path) -> None:
    def script(index: int, body: Body) -> Answer:
        if index in (1, 2):
            return Answer(0, status=429, headers={"Retry-After": "3"}, first_s=0.02)
        return Answer(0, status=503) if index == 3 else faithful(index, body)

    document, _ = measure(tmp_path, script, "--requests", "8", "--output-len", "4")  # refusing is no failure
    figures = document["phases"][0]["figures"]
    assert (figures["num_ok"], figures["num_refused"], figures["num_failed"]) == (5, 3, 0)
    assert figures["errors"] == {"429": 2, "503": 1}
    assert figures["retry_after_s"]["mean"] == 3.0 and figures["retry_after_s"]["count"] == 2
    assert figures["refusal_s"]["count"] == 3 and figures["refusal_s"]["max"] >= 0.02
    assert figures["ttft_s"]["count"] == figures["e2e_s"]["count"] == 5  # a quick refusal is no quick answer


@pytest.mark.parametrize("chunked", [True, False])
def test_disconnects_errors_and_timeouts_are_told_apart(tmp_path: Path, chunked: bool) -> None:
    answers = {
        0: Answer(4, cut_after=0),
        1: Answer(4, cut_after=2),
        2: Answer(4, error_after=2),
        3: Answer(0, status=500),
        4: Answer(4, first_s=30.0),
    }

    def script(index: int, body: Body) -> Answer:
        answer = answers.get(index) or faithful(index, body)
        answer.chunked = chunked
        return answer

    document, _ = measure(
        tmp_path, script, "--requests", "6", "--output-len", "4", "--concurrency", "1", "--timeout", "1", status=1
    )
    [phase] = document["phases"]
    outcomes = [sample["outcome"] for sample in phase["samples"]]
    assert outcomes == ["disconnected", "disconnected", "failed", "failed", "timeout", "ok"]
    assert "out of memory" in phase["samples"][2]["error"]
    figures = phase["figures"]
    assert (figures["num_disconnected"], figures["num_failed"], figures["num_ok"]) == (2, 3, 1)
    assert figures["errors"] == {"disconnected": 2, "failed": 1, "500": 1, "timeout": 1}


def test_a_server_that_keeps_its_connections_open_is_not_waited_for(tmp_path: Path) -> None:
    document, _ = measure(
        tmp_path,
        lambda index, body: Answer(4, status=(200, 429)[index % 2], open_s=30.0),
        "--requests",
        "4",
        "--output-len",
        "4",
        "--timeout",
        "5",
    )
    figures = document["phases"][0]["figures"]
    assert (figures["num_ok"], figures["errors"]) == (2, {"429": 2})


def test_nobody_there_is_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert serving.main(["--url", f"http://127.0.0.1:{taken.getsockname()[1]}", "--pause", "0"]) == 1
    assert "cannot connect" in capsys.readouterr().err
    assert serving.main(["--url", "localhost:8000"]) == 1
    assert "write http://HOST:PORT" in capsys.readouterr().err


# -- arithmetic


def test_percentiles_lie_between_ranks() -> None:
    values = [4.0, 1.0, 3.0, 2.0]
    assert [percentile(values, percent) for percent in (0, 50, 90, 100)] == pytest.approx([1.0, 2.5, 3.7, 4.0])
    assert percentile([7.0], 99) == 7.0
    assert spread([None, 1.0, 3.0, None]) == {
        "mean": 2.0,
        "p50": 2.0,
        "p90": 2.8,
        "p95": 2.9,
        "p99": 2.98,
        "max": 3.0,
        "count": 2,
    }
    assert spread([None]) is None


def test_speeds_run_from_the_first_request_to_the_last_token() -> None:
    figures = summarize([made(1.0, 1.0, 2.0), made(2.0, 1.0, 4.0)], Limits())
    assert figures["duration_s"] == 5.0
    assert (figures["output_tokens_per_s"], figures["requests_per_s"]) == (22 / 5, 2 / 5)
    assert figures["tpot_s"]["mean"] == pytest.approx((0.1 + 0.3) / 2)


def test_goodput_counts_what_keeps_both_limits() -> None:
    samples = [
        made(0.0, 1.0, 2.0),
        made(0.0, 1.5, 2.0),
        made(0.0, 1.0, 4.0),
        made(0.0, 0.1, 0.2, outcome="wrong length"),
        made(0.0, 0.9, 0.9, num_output=1),
    ]
    goodput = summarize(samples, Limits(ttft_s=1.0, tpot_s=0.2))["goodput"]
    assert (goodput["num"], goodput["share"], goodput["requests_per_s"]) == (2, 0.4, 0.5)
    assert summarize([], Limits())["goodput"]["share"] == 0.0


def test_overload_is_a_multiple_of_the_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script(index: int, body: Body) -> Answer:
        """Of the second phase every other request is refused."""
        if index >= 8 and index % 2:
            return Answer(0, status=429, headers={"Retry-After": "1"})
        return Answer(body["max_tokens"], first_s=0.01)

    document, server = measure(
        tmp_path,
        script,
        "--workload",
        "overload",
        "--overload",
        "3",
        "--concurrency",
        "2",
        "--requests",
        "10",
        "--output-len",
        "2",
        "--input-len",
        "4",
        "--max-ttft",
        "60",
    )
    capacity, overload = document["phases"]
    assert (capacity["phase"], capacity["concurrency"], capacity["rate"]) == ("capacity", 2, None)
    assert capacity["figures"]["num_requests"] == 8 and capacity["figures"]["num_ok"] == 8
    assert overload["rate"] == pytest.approx(3 * capacity["figures"]["requests_per_s"])
    figures = overload["figures"]
    assert (figures["num_requests"], figures["num_refused"], figures["num_ok"]) == (10, 5, 5)
    assert figures["goodput"]["num"] == 5 and figures["goodput"]["share"] == 0.5
    questions = [body["messages"][0]["content"] for body in server.bodies]
    assert len(set(questions)) == len(questions)  # no phase meets another's prompts
    assert "Goodput under overload" in capsys.readouterr().out


def test_a_given_capacity_is_not_measured(tmp_path: Path) -> None:
    document, _ = measure(
        tmp_path, faithful, "--workload", "overload", "--capacity", "100", "--requests", "3", "--output-len", "2"
    )
    [phase] = document["phases"]
    assert phase["rate"] == 200.0
    with pytest.raises(ServerFailed, match="capacity is 0"):
        offered_rate(0.0, 2.0)


# -- the document and the command line


def test_the_document_says_where_it_comes_from_and_is_never_overwritten(tmp_path: Path) -> None:
    document, server = measure(
        tmp_path, faithful, "--requests", "2", "--note", "a trial", "--nonce", "n", "--seed", "5"
    )
    assert document["complete"] and document["kind"] == "serving" and document["schema"] == 1
    assert {"started", "ended", "commit", "changed", "busy_share", "server_version"} <= set(document)
    assert document["versions"]["python"] and document["machine"]["cores"] >= 1
    assert (document["nonce"], document["seed"], document["url"]) == ("n", 5, server.url)
    assert document["workload"]["num_requests"] == 2 and document["notes"][0] == "a trial"
    [phase] = document["phases"]
    assert len(phase["samples"]) == 2 and phase["figures"]["client_cpu_per_token_s"] > 0
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert set(phase["figures"][name]) == {"mean", "p50", "p90", "p95", "p99", "max", "count"}
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(SystemExit):
        serving.main(["--output", str(tmp_path / "result.json")])
    assert (tmp_path / "result.json").read_bytes() == before


@pytest.mark.parametrize(
    "words",
    [
        ["--requests", "0"],
        ["--rate", "-1"],
        ["--rate", "1", "--concurrency", "1"],
        ["--extra", "[]"],
        ["--workload", "none"],
    ],
)
def test_options_out_of_range_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        serving.main(words)
    assert ended.value.code == 2


def test_a_table_with_every_figure_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(tmp_path, faithful, "--output-len", "3")
    out = capsys.readouterr().out
    for part in (
        "| burst-new-prefix, 16 at once | 16 | 16 | 0 | 0 | 0 | 0 |",
        "| TTFT, s |",
        "| TPOT, ms |",
        "| ITL, ms |",
        "| E2E, s |",
        "p99",
        "µs per token",
    ):
        assert part in out

"""Answers that are made up: hostile markdown, reasoning, tool calls, schemas, tokens, failures."""

from __future__ import annotations

import json
import random
from typing import Any

from tests.page.chat_page import COMPLETIONS, ChatPage, encode

EVIL = (
    "<script>window.hit = 1</script>\n\n<img src=x onerror='window.hit = 2'>\n\n"
    "[click](javascript:window.hit=3) [data](data:text/html,<script>alert(1)</script>) [own](/admin/live)\n\n"
    "![picture](http://127.0.0.1:9/pixel.png) <svg onload=alert(1)> <iframe src=//x></iframe>\n\n"
    "[a](https://example.org/\"onmouseover=\"alert(1)) <a href='javascript:alert(1)'>x</a>\n\n"
    "| <b onclick=alert(1)>h</b> | `<i>` |\n|---|---|\n| [j](JaVaScRiPt:alert(1)) | &lt; <br> |\n\n"
    '```"><script>alert(1)</script>\n</code></pre><script>window.hit = 4</script>\n'
)
RICH = (
    "# Head\n\nSome *slanted*, **bold**, ***both***, ~~gone~~ and `code` with snake_case_names.\n\n"
    "1. one\n   - a\n   - b\n     > said\n2. two\n\n> quote\n> goes on\n\n"
    "| left | right |\n|:--|--:|\n| 1 | **2** |\n| a\\|b | `c` |\n\n---\n\n"
    "```python\ndef f():\n    return '<b>'\n```\n\n[link](https://example.org/a_(b)?q=1#x \"title\") "
    "https://example.org/bare.\n\nEnd *"
)


def show(chat: ChatPage, answer: str) -> None:
    chat.script(answer)
    chat.ask("Go")


def html_of(chat: ChatPage, text: str, sizes: list[int]) -> str:
    """Render pieces of a text, of these sizes in turn, as a stream would bring them."""
    return str(
        chat.page.evaluate(
            """async ([text, sizes]) => {
                const { MarkdownStream } = await import("/page/markdown/stream.js");
                const root = document.createElement("div"), stream = new MarkdownStream(root);
                for (let at = 0, turn = 0; at < text.length; turn++) {
                    const size = sizes[turn % sizes.length];
                    stream.push(text.slice(at, at + size));
                    stream.flush();
                    at += size;
                }
                stream.finish();
                root.normalize();
                return root.innerHTML;
            }""",
            [text, sizes],
        )
    )


def test_hostile_answer_runs_nothing(chat: ChatPage) -> None:
    asked: list[str] = []
    chat.page.on("request", lambda request: asked.append(request.url))
    show(chat, EVIL)
    answer = chat.page.locator(".message:last-child .answer > .markdown")
    assert chat.page.evaluate("window.hit") is None
    assert answer.locator("script, img, iframe, svg:not(.icon), i, b, [onclick], [onload], [onerror]").count() == 0
    links = answer.locator("a").evaluate_all("(all) => all.map((one) => [one.getAttribute('href'), one.rel])")
    assert links and all(href.startswith(("https://example.org/", "http://127.0.0.1:9/")) for href, _ in links)
    assert all("noopener" in rel for _, rel in links)
    assert "<script>window.hit = 1</script>" in answer.inner_text() and "onclick=alert(1)" in answer.inner_text()
    assert not [url for url in asked if "pixel" in url]


def test_policy_stops_what_a_script_would_do(chat: ChatPage) -> None:
    """The second wall: markup that got into the page could still not run."""
    tried = """() => {
        const node = document.createElement("div");
        try { node.innerHTML = "<img src=x onerror='window.hit = 1'>"; } catch (error) { return error.name; }
    }"""
    assert chat.page.evaluate(tried) == "TypeError"
    chat.page.evaluate("window.trouble = []")  # it was meant


def test_markdown_is_shown(chat: ChatPage) -> None:
    html = html_of(chat, RICH, [len(RICH)])
    for part in (
        "<h1",
        "<em>slanted</em>, <strong>bold</strong>, <strong><em>both</em></strong>, <del>gone</del>",
        "snake_case_names",
        "<blockquote",
        '<td class="right"><strong>2</strong></td>',
        "a|b",
        "<hr>",
        "return '&lt;b&gt;'",
        'href="https://example.org/a_(b)?q=1#x"',
        ">https://example.org/bare</a>.",
        "End *",
    ):
        assert part in html, part
    assert html.count("<ol") == 1 and html.count("<ul") == 1 and html.count("<li>") == 4


def test_markdown_does_not_depend_on_how_it_arrives(chat: ChatPage) -> None:
    chance = random.Random(7)
    pieces = [
        "*",
        "**",
        "_",
        "`",
        "```\n",
        "~~",
        "- ",
        "1. ",
        "> ",
        "# ",
        "|",
        "|-|-|\n",
        "\n",
        "\n\n",
        "  ",
        "a",
        "word ",
        "[x](",
        ")",
        "https://a.b ",
        "---\n",
        "\\",
        "<br>",
        "![",
        "]",
    ]
    texts = [EVIL, RICH, *("".join(chance.choices(pieces, k=60)) for _ in range(60))]
    for text in texts:
        whole = html_of(chat, text, [max(1, len(text))])
        assert html_of(chat, text, [1]) == whole, text
        assert html_of(chat, text, [chance.randint(1, 9) for _ in range(5)]) == whole, text


HOSTILE = [
    *(
        "*a ",
        "[",
        "](",
        "![[a](b]",
        "`a``",
        "> ",
        ">> - 1. ",
        "- \n",
        "|a",
        "a|b\n-|-\n",
        "# \n",
        "```\n",
        "~~_**",
        "<",
        "\\",
    ),
    *("http://", "(", "\n", "  - x\n", "1 `1` "),
]
GROW = """async (unit) => {
    const { MarkdownStream } = await import("/page/markdown/stream.js");
    const root = document.createElement("div"), stream = new MarkdownStream(root);
    document.querySelector(".messages").append(root);
    const text = unit.repeat(Math.ceil(200_000 / unit.length));
    const begun = performance.now();
    for (let at = 0; at < text.length && performance.now() - begun < 20_000; at += 1000) {
        stream.push(text.slice(at, at + 1000));
        stream.flush();
    }
    stream.finish();
    const isQuick = performance.now() - begun < 20_000, walker = document.createTreeWalker(root);
    let deepest = 0, depth = 0;
    for (let at = root; at; ) {
        deepest = Math.max(deepest, depth);
        if (at.firstChild) [at, depth] = [at.firstChild, depth + 1];
        else {
            while (at !== root && !at.nextSibling) [at, depth] = [at.parentNode, depth - 1];
            at = at === root ? null : at.nextSibling;
        }
    }
    const num = root.querySelectorAll("*").length;
    root.remove();
    return [isQuick, num, deepest];
}"""


def test_long_hostile_text_does_not_freeze_the_tab(chat: ChatPage) -> None:
    """200 kB of each as a stream brings it. What is quadratic in the text takes minutes."""
    for unit in HOSTILE:
        is_quick, num_elements, depth = chat.page.evaluate(GROW, unit)
        assert is_quick and num_elements <= 21_000 and depth <= 60, (unit, num_elements, depth)


def test_reasoning_is_folded(chat: ChatPage) -> None:
    chat.script([{"delta": {"reasoning_content": "Let me *think*."}}, {"delta": {"content": "Done."}}], "Again.")
    assert chat.ask("Go") == "Done."
    folded = chat.page.locator("details.reasoning")
    assert folded.get_attribute("open") is None
    folded.locator("summary").click()
    assert folded.locator("em").inner_text() == "think"
    chat.ask("More")
    assert chat.bodies[1]["messages"][1] == {
        "role": "assistant",
        "content": "Done.",
        "reasoning_content": "Let me *think*.",
    }


TOOLS = '[{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]'


def test_tool_calls_are_answered_by_hand(chat: ChatPage) -> None:
    def call(index: int, **function: str) -> dict[str, Any]:
        named = {"id": f"call-{index}", "type": "function"} if "name" in function else {}
        return {"delta": {"tool_calls": [{"index": index, **named, "function": function}]}}

    calls = [
        call(0, name="add", arguments=""),
        call(0, arguments='{"a": 1'),
        call(0, arguments=', "b": 2}'),
        call(1, name="add", arguments="{}"),
    ]
    chat.script([*calls, {"delta": {}, "finish_reason": "tool_calls"}], "It is **3**.")
    chat.set_parameter("Tools", "[{]")
    assert "not JSON" in chat.page.locator(".json-foot .mark").last.inner_text()
    chat.set_parameter("Tools", TOOLS)
    chat.set_parameter("Calls", "required")
    chat.ask("Add 1 and 2")
    assert json.loads(chat.page.locator(".call pre").first.inner_text()) == {"a": 1, "b": 2}
    chat.page.get_by_label("Result of add").first.fill("3")
    chat.page.get_by_label("Result of add").last.fill("nothing")
    chat.page.get_by_role("button", name="Send the results").click()
    assert chat.wait_end() == "It is 3."
    sent = chat.bodies[1]["messages"]
    assert sent[1]["tool_calls"][0] == {
        "id": "call-0",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
    }
    assert sent[2:] == [
        {"role": "tool", "tool_call_id": "call-0", "content": "3"},
        {"role": "tool", "tool_call_id": "call-1", "content": "nothing"},
    ]
    assert chat.bodies[0]["tools"] == json.loads(TOOLS)
    assert [body["tool_choice"] for body in chat.bodies] == ["required", "auto"], "with the results it may answer"


SCHEMA = '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}'


MARKS = {
    '{"age": 7}': ("good", "Valid by the schema"),
    '{"age": "x"}': ("bad", "$.age must be integer"),
    '{"old": 7}': ("bad", '$ has no "age"'),
    '{"age": 7': ("bad", "ends too early"),
    '{"age": 07}': ("bad", "character 10 does not fit"),
}


def test_schema_mode_marks_validity(chat: ChatPage) -> None:
    chat.script(*MARKS)
    chat.set_parameter("Answers are", "json_schema")
    chat.set_parameter("Schema", SCHEMA)
    for kind, told in MARKS.values():
        chat.ask("Go")
        mark = chat.page.locator(".answer .mark").last
        assert kind in str(mark.get_attribute("class")).split() and told in mark.inner_text()
    assert chat.bodies[0]["response_format"]["json_schema"]["schema"] == json.loads(SCHEMA)


def test_json_is_checked_as_it_arrives(chat: ChatPage) -> None:
    """Against the browser's own parser: every prefix that could go on is `begun`, every text that parses is `whole`."""
    chance = random.Random(3)
    pieces = [
        "{",
        "}",
        "[",
        "]",
        '"',
        '"a"',
        ":",
        ",",
        " ",
        "1",
        "-",
        "0",
        ".5",
        "e3",
        "true",
        "null",
        "\\",
        "\\u00e9",
        "\n",
        "x",
    ]
    texts = [
        '{"a": [1, 2.5e-3, {"b": null}], "c": "\\u00e9\\n"} ',
        "-0.1",
        "[01]",
        '"\n"',
        "[1,]",
        '{"a":1,}',
        *("".join(chance.choices(pieces, k=chance.randint(1, 8))) for _ in range(2000)),
    ]
    wrong = chat.page.evaluate(
        """async (texts) => {
            const { JsonCheck } = await import("/page/chat/schema.js");
            return texts.filter((text) => {
                const check = new JsonCheck();
                for (const char of text) check.push(char);
                let parses = true;
                try { JSON.parse(text); } catch { parses = false; }
                return parses !== (check.state === "whole");
            });
        }""",
        texts,
    )
    assert wrong == []


def test_tokens_show_their_alternatives(chat: ChatPage) -> None:
    top = [{"token": " blue", "logprob": -0.1}, {"token": " red", "logprob": -2.5}]
    entries = [
        {"token": "Sky", "logprob": 0.0, "top_logprobs": []},
        {"token": " red", "logprob": -2.5, "top_logprobs": top},
    ]
    chat.script([{"delta": {"content": "Sky red"}, "logprobs": {"content": entries}}])
    chat.set_parameter("Keep log probabilities", "true")
    chat.ask("Go")
    assert chat.bodies[0]["logprobs"] is True and chat.bodies[0]["top_logprobs"] == 8
    chat.press("Tokens and their shares")
    chat.page.locator(".token").first.focus()
    chat.page.keyboard.press("ArrowRight")
    rows = chat.page.locator(".alternative").all_inner_texts()
    assert ["·blue" in rows[0], "90.5 %" in rows[0], "·red" in rows[1], "8.2 %" in rows[1]] == [True] * 4
    assert "chosen" in str(chat.page.locator(".alternative").nth(1).get_attribute("class"))


def test_alternatives_are_shown_where_there_is_room(chat: ChatPage) -> None:
    top = [{"token": f"word{at}", "logprob": -3.0} for at in range(8)]
    entries = [{"token": "line\n", "logprob": -1.0, "top_logprobs": top} for _ in range(60)]
    chat.script([{"delta": {"content": "line\n" * 60}, "logprobs": {"content": entries}}])
    chat.set_parameter("Keep log probabilities", "true")
    chat.ask("Go")
    chat.press("Tokens and their shares")
    for at in (0, 30, 59):
        chat.page.locator(".token").nth(at).scroll_into_view_if_needed()
        chat.page.locator(".token").nth(at).hover()
        shown, seen = (chat.page.locator(name).bounding_box() for name in (".alternatives", ".scroller"))
        assert shown["y"] >= seen["y"] and shown["y"] + shown["height"] <= seen["y"] + seen["height"], at


def test_figures_of_drafts_and_cache_are_shown(chat: ChatPage) -> None:
    show(chat, "Hello.")
    shown = ["50.0 tokens/s", "16 of 20 cached", "5 of 6 drafts accepted", "timeline"]
    assert chat.figures[1:2] + chat.figures[3:] == shown


def test_failures_are_told_in_words(chat: ChatPage) -> None:
    error = {
        "error": {"message": "temperature=9 is too high", "type": "invalid_request_error", "param": None, "code": None}
    }
    answers: list[dict[str, Any]] = [
        {"status": 400, "content_type": "application/json", "body": json.dumps(error)},
        {
            "status": 503,
            "headers": {"Retry-After": "7"},
            "content_type": "application/json",
            "body": json.dumps({"error": {"message": "too busy"}}),
        },
        {
            "content_type": "text/event-stream",
            "body": f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': 'Half'}}]})}\n\n",
        },
        {"content_type": "text/event-stream", "body": f"data: {json.dumps(error)}\n\n"},
        {"content_type": "text/event-stream", "body": encode([{"delta": {"content": " whole."}}])},
    ]
    chat.page.route(COMPLETIONS, lambda route: route.fulfill(**answers.pop(0)))
    notice = chat.page.locator(".message:last-child .answer-notice")
    chat.ask("Go")
    assert "temperature=9 is too high" in notice.inner_text()
    for told in ("too busy Try again in 7 s.", "connection to the server was lost"):
        chat.press_retry("Try again")
        assert told in notice.inner_text()
    assert chat.text == "Half"
    chat.press_retry("Continue")
    assert "temperature=9" in notice.inner_text() and chat.text == "Half"
    chat.page.unroute(COMPLETIONS)
    chat.page.route(COMPLETIONS, lambda route: route.abort())
    chat.press_retry("Try again")
    assert "cannot be reached" in notice.inner_text()
    chat.page.unroute(COMPLETIONS)
    chat.page.route(COMPLETIONS, lambda route: route.fulfill(**answers.pop(0)))
    chat.press_retry("Try again")
    assert chat.text == "whole."

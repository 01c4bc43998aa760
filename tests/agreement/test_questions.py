"""Ten questions whose answers are known, asked of the default model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock import LLM, SamplingParams
from tests.agreement.reference import model_path

QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "What is 2 + 2?": "4",
    "What gas do plants absorb from the air?": "carbon dioxide",
    "Who wrote Romeo and Juliet?": "Shakespeare",
    "What is the chemical symbol for water?": "H2O",
    "Which planet is known as the Red Planet?": "Mars",
    "Who was the first person to walk on the Moon?": "Armstrong",
    "What is the opposite of hot?": "cold",
    "How many days are there in a week?": "7",
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(model_path("smollm2")), progress=False, max_model_len=512) as llm:
        yield llm


def test_answers_hold_the_known_words(llm: LLM) -> None:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=48), use_tqdm=False)
    answers = {question: output.outputs[0].text for question, output in zip(QUESTIONS, outputs)}
    missed = {question: answers[question] for question, word in QUESTIONS.items() if word not in answers[question]}
    assert not missed

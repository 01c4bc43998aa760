"""`penstock chat`: a conversation at the terminal."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.commands.chat.conversation import ChatMemory, fit
from penstock.commands.chat.keyboard import Keyboard, read_message
from penstock.commands.flags.options import (
    ModelOrDefault,
    Seed,
    System,
    Temperature,
    answer_limit,
    answer_params,
    engine_options,
    new_seed,
    open_llm,
    sampling_values,
)
from penstock.commands.output import stream_answer, write_note, write_text
from penstock.commands.prompt import not_text, read_word
from penstock.errors import InvalidModel, InvalidRequest, PenstockError
from penstock.hub.names import DEFAULT_MODEL

HELP = '''/help         this list
/clear        forget the conversation
/save FILE    write the conversation: JSON if FILE ends in .json, else Markdown
/bye          leave; Ctrl-D does too
Ctrl-C        stop the answer
"""           begin and end a message of several lines; or end a line with \\ to go on; pasted lines are one'''

MaxTokens = Annotated[
    int | None, typer.Option("--max-tokens", help="Maximum tokens of each answer. [default: as many as fit]")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Print figures after every answer.")]


@engine_options("seed", "skip_tokenizer_init")
def chat(
    model: ModelOrDefault = DEFAULT_MODEL,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    seed: Seed = None,
    verbose: Verbose = False,
    *,
    options: dict[str, Any],
) -> None:
    """Chat with a model; /help lists the commands."""
    system = read_word(system, "the system message") if system else None
    converse(model, system, sampling_values(max_tokens, temperature, seed), options, verbose)


def converse(model: str, system: str | None, values: dict[str, Any], options: dict[str, Any], verbose: bool) -> None:
    llm = open_llm(model, options)
    keyboard = Keyboard()
    try:
        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            raise InvalidModel(f"{model} has no chat template: use `penstock run` with a prompt instead")
        Chat(llm, keyboard, ChatMemory(system), values, verbose).loop()
    finally:
        keyboard.save_history()
        llm.close()


class Chat:
    """Reads messages and prints answers until the user leaves."""

    def __init__(
        self, llm: Any, keyboard: Keyboard, conversation: ChatMemory, values: dict[str, Any], verbose: bool
    ) -> None:
        self._llm, self._keyboard, self._conversation = llm, keyboard, conversation
        self._values, self._verbose = values, verbose

    def loop(self) -> None:
        if self._keyboard.is_terminal:
            write_note("/help lists what you can type, Ctrl-D leaves")
        while True:
            try:
                message = read_message(self._keyboard.read_line, self._keyboard.has_more)
            except EOFError:
                if self._keyboard.is_terminal:
                    write_text("\n")
                return
            except KeyboardInterrupt:
                write_text("\n")
                write_note("Ctrl-D or /bye leaves")
                continue
            except UnicodeError as error:  # the rest of the buffer is lost with it
                raise InvalidRequest(not_text(error)) from None
            if message == "/bye":
                return
            try:
                self._do(message)
            except PenstockError as error:
                write_note(f"error: {error}")
            except BrokenPipeError:
                raise
            except Exception as error:  # the conversation can still be saved
                write_note(f"error: unexpected {type(error).__name__}: {error}")

    def _do(self, message: str) -> None:
        command, _, argument = message.partition(" ")
        if not message:
            return
        if "\n" in message:
            self._ask(message)
        elif command in ("/help", "/?"):
            write_note(HELP)
        elif command == "/clear":
            self._conversation.clear()
            write_note("the conversation is cleared")
        elif command == "/save":
            if not argument.strip():
                write_note("error: /save needs a file name")
            else:
                write_note(f"saved to {self._conversation.save(argument.strip())}")
        elif command.startswith("/") and "/" not in command[1:]:
            write_note(f"error: unknown command {command}; /help lists the known ones")
        else:
            self._ask(message)

    def _ask(self, message: str) -> None:
        """Stream the answer. Earlier turns are in the prefix cache, so only the new message is computed."""
        self._conversation.add("user", message)
        params = answer_params(self._llm, {"seed": new_seed(), **self._values})
        try:
            self._fit()
            answer = stream_answer(
                self._llm, self._conversation.sent_messages(), params, write_text, answer_limit(self._llm, self._values)
            )
        except BaseException:
            self._conversation.drop_last()
            raise
        if answer.text:
            self._conversation.add("assistant", answer.text)
        else:
            self._conversation.drop_last()
        if not answer.text.endswith("\n"):
            write_text("\n")
        if self._verbose:
            write_note(answer.figures.line())

    def _fit(self) -> None:
        num_forgotten = fit(self._llm, self._conversation, self._values.get("max_tokens"))
        if num_forgotten:
            turns = "oldest turn is" if num_forgotten == 1 else f"oldest {num_forgotten} turns are"
            write_note(
                f"note: the context of {self._llm.service.intake.longest} tokens is full, so the {turns} no "
                "longer sent; /save still writes all"
            )

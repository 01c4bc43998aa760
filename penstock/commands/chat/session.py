"""The loop of a chat: read a message, do a command or answer."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.commands.chat import settings
from penstock.commands.chat.conversation import ChatMemory, fit
from penstock.commands.chat.keyboard import Keyboard
from penstock.commands.chat.partner import Partner
from penstock.commands.chat.slash import SLASHES, help_text, split
from penstock.commands.flags.options import answer_limit, answer_params, new_seed
from penstock.commands.output import PrintedAnswer, Table, stream_answer, write_note, write_text
from penstock.commands.prompt import not_text
from penstock.errors import InvalidRequest, PenstockError

OFF = "off"


class Session:
    """Reads messages and prints answers until the user leaves."""

    def __init__(
        self, partner: Partner, memory: ChatMemory, values: dict[str, Any], verbose: bool, renders: bool
    ) -> None:
        self._partner, self._memory, self._values = partner, memory, values
        self._verbose, self._renders = verbose, renders
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: write_note(help_text()),
            "/set": self._set,
            "/system": self._set_system,
            "/schema": self._set_schema,
            "/model": self._change_model,
            "/regenerate": self._regenerate,
            "/undo": self._undo,
            "/clear": self._clear,
            "/save": self._save,
            "/load": self._load,
        }

    def loop(self, keyboard: Keyboard) -> None:
        if keyboard.is_terminal:
            write_note("/help lists what you can type, Ctrl-D leaves")
        while True:
            try:
                message = keyboard.read_message()
            except EOFError:
                if keyboard.is_terminal:
                    write_text("\n")
                return
            except KeyboardInterrupt:
                write_note("Ctrl-D or /bye leaves")
                continue
            except UnicodeError as error:  # the rest of the buffer is lost with it
                raise InvalidRequest(not_text(error)) from None
            if message == "/bye":
                return
            try:
                self._do(message)
            except PenstockError as error:
                self._say(f"error: {error}")
            except BrokenPipeError:
                raise
            except Exception as error:  # the conversation can still be saved
                self._say(f"error: unexpected {type(error).__name__}: {error}")

    def _do(self, message: str) -> None:
        if not message:
            return
        if (found := split(message)) is None:
            self._ask(message)
            return
        command, argument = found
        if command not in SLASHES:
            raise InvalidRequest(f"unknown command {command}; /help lists the known ones")
        if argument and not SLASHES[command].argument:
            raise InvalidRequest(f"{command} takes nothing after it; /help lists the commands")
        self._commands[command](argument)

    def _set(self, text: str) -> None:
        defaults = answer_params(self._partner.llm, {})
        if not text:
            table = Table()
            for name in settings.KINDS:
                table.add(name, settings.describe_setting(name, self._values, defaults))
            write_note(table.plain() + "/set NAME explains one, /set NAME VALUE changes it")
            return
        name = text.split()[0].replace("-", "_").lower()
        if len(text.split()) > 1:
            self._values = settings.change(self._values, text)
        elif name not in settings.KINDS:
            settings.change(self._values, text)  # says which there are
        self._say(f"{name}: {settings.describe_setting(name, self._values, defaults)}. {settings.NOTES[name]}")

    def _set_system(self, text: str) -> None:
        if text:
            self._memory.set_system(None if text == OFF else text)
        self._say(f"system message: {self._memory.system or 'none'}")

    def _set_schema(self, text: str) -> None:
        from penstock.commands.flags.sampling import read_sampling

        rest = {name: value for name, value in self._values.items() if name != "structured_outputs"}
        if text == OFF:
            self._values = rest
        elif text:
            form = read_sampling({"json_schema": text})
            self._partner.llm.service.intake.compile_grammar(answer_params(self._partner.llm, form))
            self._values = {**rest, **form}
        form_now = self._values.get("structured_outputs")
        self._say(f"form of the answer: {form_now.source if form_now else 'free'}")

    def _change_model(self, name: str) -> None:
        if not name:
            from penstock.hub import list_models

            here = ", ".join(model.name for model in list_models()) or "none"
            self._say(f"model: {self._partner.name}; on this machine: {here}")
            return
        self._partner.change(name)
        self._say(f"model: {name}; the conversation goes on")

    def _regenerate(self, _: str) -> None:
        message = self._memory.drop_turn()
        self._ask(message)

    def _undo(self, _: str) -> None:
        message = self._memory.drop_turn()
        self._say(f"taken back: {_shorten(message)}")

    def _clear(self, _: str) -> None:
        self._memory.clear()
        write_note("the conversation is cleared")

    def _save(self, name: str) -> None:
        if not name:
            raise InvalidRequest("/save needs a file name")
        self._say(f"saved to {self._memory.save(name)}")

    def _load(self, name: str) -> None:
        if not name:
            raise InvalidRequest("/load needs a file name")
        num_messages = self._memory.load(name)
        self._say(f"{num_messages} messages loaded; the conversation goes on from there")

    def _ask(self, message: str) -> None:
        """Stream the answer. Earlier turns are in the prefix cache, so only the new message is computed."""
        llm = self._partner.llm
        self._memory.add("user", message)
        params = answer_params(llm, {"seed": new_seed(), **self._values})
        try:
            self._fit()
            with self._writer() as write:
                answer = stream_answer(
                    llm, self._memory.sent_messages(), params, write, answer_limit(llm, self._values)
                )
        except BaseException:
            self._memory.drop_last()
            raise
        if answer.text:
            self._memory.add("assistant", answer.text)
        else:
            self._memory.drop_last()
        self._finish(answer)

    def _finish(self, answer: PrintedAnswer) -> None:
        """Say why an answer ended early."""
        is_rendered = self._renders and "structured_outputs" not in self._values
        if not is_rendered and not answer.text.endswith("\n"):
            write_text("\n")
        if answer.interrupted:
            write_note("stopped; /regenerate answers anew")
        elif not answer.text:
            self._say("note: the answer is empty, and the message is taken back")
        elif answer.finish_reason == "length":
            num, most = answer.figures.num_generated_tokens, self._partner.llm.service.intake.longest
            is_full = answer.figures.num_prompt_tokens + num >= most
            why = f"the context of {most} tokens is full" if is_full else f"{num} tokens is the limit (/set max_tokens)"
            self._say(f"note: the answer is cut: {why}")
        if self._verbose:
            write_note(answer.figures.line())

    def _say(self, note: str) -> None:
        """Write a note, at a terminal wrapped at its words. What it quotes must not steer the terminal."""
        from penstock.commands.chat.markdown_stream import visible

        note = visible(note)
        width = shutil.get_terminal_size().columns
        write_note(textwrap.fill(note, max(20, width - 1), break_on_hyphens=False) if self._renders else note)

    @contextmanager
    def _writer(self) -> Iterator[Callable[[str], object]]:
        """An answer of a form is no Markdown."""
        if not self._renders or "structured_outputs" in self._values:
            yield write_visible if sys.stdout.isatty() else write_text
            return
        from penstock.commands.chat.line_editor import quiet_terminal
        from penstock.commands.chat.markdown_stream import MarkdownStream

        with quiet_terminal(), MarkdownStream() as stream:
            yield stream.write

    def _fit(self) -> None:
        llm = self._partner.llm
        num_forgotten = fit(llm, self._memory, self._values.get("max_tokens"))
        if num_forgotten:
            turns = "oldest turn is" if num_forgotten == 1 else f"oldest {num_forgotten} turns are"
            self._say(
                f"note: the context of {llm.service.intake.longest} tokens is full, so the {turns} no "
                "longer sent; /save still writes all"
            )


def write_visible(text: str) -> None:
    from penstock.commands.chat.markdown_stream import visible

    write_text(visible(text))


def _shorten(text: str, width: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 1] + "…"

"""`penstock completion`: complete commands, flags and models in a shell."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Annotated, Any

import typer

from penstock.errors import InvalidRequest, quote

WORDS = "words"  # what the scripts ask with
OWN_MODELS = ("rm",)  # commands for models on this machine alone
SCRIPTS = {
    "bash": """\
_penstock() {
    local IFS=$'\\n'
    COMPREPLY=($(penstock completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _penstock penstock
""",
    "zsh": """\
_penstock() {
    local -a found
    found=("${(@f)$(penstock completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    compadd -- ${found:#} || _files
}
compdef _penstock penstock
""",
    "fish": """\
function __penstock_words
    set -l typed (commandline -opc) (commandline -ct)
    penstock completion words -- $typed[2..-1] 2>/dev/null
end
complete -c penstock -a '(__penstock_words)'
""",
}
Shell = Annotated[str | None, typer.Argument(metavar="[SHELL]", hidden=True)]
Typed = Annotated[list[str] | None, typer.Argument(hidden=True)]


def completion(shell: Shell = None, typed: Typed = None) -> None:
    """Print a script that completes commands in bash, zsh or fish.

    bash: add `source <(penstock completion bash)` to ~/.bashrc. zsh: add `source <(penstock completion zsh)` to
    ~/.zshrc, after compinit. fish: penstock completion fish > ~/.config/fish/completions/penstock.fish
    """
    if shell == WORDS:
        from penstock.cli import app

        print("".join(f"{word}\n" for word in complete(typer.main.get_command(app), typed or [""])), end="")
        return
    name = shell or os.path.basename(os.environ.get("SHELL", ""))
    if name not in SCRIPTS:
        raise InvalidRequest(f"there is no completion for the shell {quote(name)}: name one of {', '.join(SCRIPTS)}")
    print(SCRIPTS[name], end="")


def complete(command: Any, typed: list[str]) -> list[str]:
    """Return what the last word may become."""
    *before, last = typed
    name = ""
    while hasattr(command, "commands") and before:
        name, *before = before
        if name not in command.commands:
            return []
        command = command.commands[name]
    options = {option: param for param in command.params for option in param.opts if option.startswith("-")}
    if before and before[-1] in options and not options[before[-1]].is_flag:
        return _filter(_choices(options[before[-1]]), last)
    if last.startswith("-"):
        shown = [option for option, param in options.items() if option.startswith("--") and not _is_foreign(param)]
        return _filter([*shown, "--help"], last)
    if hasattr(command, "commands"):
        return _filter(list(command.commands), last)
    takes_model = any("MODEL" in str(param.metavar) for param in command.params if param.param_type_name == "argument")
    return _filter([*_models(name in OWN_MODELS)], last) if takes_model else []


def _filter(words: list[str], last: str) -> list[str]:
    return sorted({word for word in words if word.startswith(last)})


def _is_foreign(param: Any) -> bool:
    """True for vLLM's flags, which are taken and hidden."""
    return bool(param.hidden and not param.rich_help_panel)


def _choices(param: Any) -> list[str]:
    """List an option's choices; none leaves files to the shell."""
    return param.metavar.split("|") if param.metavar and "|" in param.metavar else []


def _models(stored_alone: bool) -> Iterator[str]:
    from penstock.hub import list_models
    from penstock.hub.names import SHORT_NAMES

    with suppress(OSError):
        yield from (model.name for model in list_models())
    if not stored_alone:
        yield from SHORT_NAMES

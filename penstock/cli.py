"""The command line: the commands, and how failures are reported."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock.commands import bench, completion, info, models, perplexity, ps, run, run_batch, serve
from penstock.commands.chat import chat
from penstock.commands.flags.command import USAGE_ERROR, Command
from penstock.commands.machine import plan, tune, verify
from penstock.commands.quantize import quality, quantize
from penstock.commands.route import route
from penstock.commands.streams import close_broken, mend_streams
from penstock.commands.top import top
from penstock.errors import PenstockError
from penstock.host.interrupts import INTERRUPTED

FAILED, USAGE, BROKEN_PIPE, TERMINATED = 1, 2, 141, 143
REMEDIES = {
    errno.ENOSPC: "free some space, or write elsewhere",
    errno.EDQUOT: "free some space, or write elsewhere",
    errno.EFBIG: "raise the limit of a file's size with `ulimit -f unlimited`",
    errno.EMFILE: "raise the limit of open files with `ulimit -n 1024`",
    errno.ENFILE: "the system has too many open files: end some programs",
    errno.EBADF: "a standard stream is not open for reading or writing; check the redirections",
    errno.EROFS: "choose a writable folder with PENSTOCK_HOME or TMPDIR",
    errno.EACCES: "choose a folder you may use with PENSTOCK_HOME or TMPDIR",
    errno.ENOMEM: "free some memory, or choose a smaller model",
    errno.EAGAIN: "raise the limit of processes with `ulimit -u`",
}


class CommandList(TyperGroup):
    """All commands; their list fits a screen."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write("Usage: penstock COMMAND [ARGS]...; `penstock COMMAND --help` explains one\n")
        self.format_commands(ctx, formatter)


app = typer.Typer(
    name="penstock",
    cls=CommandList,
    help="Run language models, small and exact.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
COMMANDS: dict[str, Callable[..., None]] = {
    "run": run.run,
    "chat": chat.chat,
    "serve": serve.serve,
    "route": route.route,
    "ps": ps.ps,
    "stop": ps.stop,
    "top": top.top,
    "run-batch": run_batch.run_batch,
    "pull": models.pull,
    "list": models.list_,
    "rm": models.rm,
    "info": info.info,
    "merge": models.merge,
    "plan": plan.plan,
    "verify": verify.verify,
    "tune": tune.tune,
    "perplexity": perplexity.perplexity,
    "quantize": quantize.quantize,
    "quality": quality.quality,
    "completion": completion.completion,
}
for _name, _command in COMMANDS.items():
    app.command(_name, cls=Command)(_command)
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"penstock {info.version()}")
        raise typer.Exit()


@app.callback()
def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    mend_streams()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    try:
        status = _invoke(sys.argv[1:] if arguments is None else list(arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        close_broken()  # the reader of our output is gone
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except PenstockError as error:
        return _fail(str(error), error)
    except OSError as error:
        return _fail(_system_message(error), error)
    except Exception as error:
        name = type(error).__name__
        return _fail(f"unexpected {name}: {error}; set PENSTOCK_DEBUG=1 to see where", error)


def _invoke(arguments: list[str]) -> int:
    command: Any = typer.main.get_command(app)
    try:
        with command.make_context("penstock", arguments) as context:
            command.invoke(context)
    except typer.Exit as leave:
        return int(leave.exit_code)
    except USAGE_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.ctx.get_help())
            return 0
        where = error.ctx.command_path if error.ctx else "penstock"
        _complain(f"{error.format_message()} (see {where} --help)")
        return USAGE
    return 0


def _fail(message: str, error: BaseException) -> int:
    if os.environ.get("PENSTOCK_DEBUG"):
        import traceback

        traceback.print_exception(type(error), error, error.__traceback__)
    _complain(message)
    return FAILED


def _complain(message: str) -> None:
    """Write one line to standard error, if it can be written."""
    close_broken()
    with contextlib.suppress(OSError, ValueError):
        print(f"error: {_one_line(message)}", file=sys.stderr)
    close_broken()


def _system_message(error: OSError) -> str:
    """Return the system's reason, the file if any, and the remedy."""
    where = f" ({error.filename})" if error.filename is not None else ""
    remedy = REMEDIES.get(error.errno or 0, "set PENSTOCK_DEBUG=1 to see where")
    return f"{error.strerror or f'unexpected {type(error).__name__}: {error}'}{where}: {remedy}"


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(TERMINATED)


if __name__ == "__main__":
    sys.exit(main())

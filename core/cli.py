"""The `tokenbus` command: parsers here, bodies in `commands/`, imported when they run."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .errors import TokenbusError, plain_text
from .settings_cli import add_settings, make_config

OFFLINE = ("model", "cache", "scheduler", "features")
"""Sections of settings that make sense without a server."""


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 with one line on standard error when something can't start, 2 for a wrong command line."""
    arguments = make_parser().parse_args(argv)
    try:
        command = importlib.import_module(f".commands.{arguments.command.replace('-', '_')}", __package__)
        return command.run(arguments, make_config(arguments))
    except TokenbusError as error:
        return fail(error.message)
    except BrokenPipeError:
        return 1
    except UnicodeDecodeError as error:
        return fail(f"the input is not valid {error.encoding}: byte {error.object[error.start]:#04x} {error.reason}")
    except UnicodeEncodeError as error:
        return fail(f"the output can't be written as {error.encoding}: set PYTHONIOENCODING=utf-8 or a UTF-8 locale")
    except OSError as error:
        return fail(str(error))
    except KeyboardInterrupt:
        return 130


def fail(message: str) -> int:
    """One line on standard error; the exit code."""
    print(f"tokenbus: {plain_text(message)}", file=sys.stderr)
    return 1


def make_parser() -> argparse.ArgumentParser:
    """A command NAME is `commands/NAME.py` with `run(arguments, config) -> int`."""
    parser = argparse.ArgumentParser(
        prog="tokenbus", description="Serve language models; every feature is a switch.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _serve(_command(commands, "serve", "answer HTTP requests with a model (OpenAI's API)"))
    _watcher(_command(commands, "top", "show what a running server does, in the terminal")).add_argument(
        "--once", action="store_true", help="one look, as plain text; so it is too when standard output is no terminal"
    )
    _doctor(_watcher(_command(commands, "doctor", "check a running server and say what is out of its healthy range")))
    _plugins(_command(commands, "plugins", "list every plugin: on, off, and why"))
    _plan_memory(_command(commands, "plan-memory", "say what a model needs in memory, without loading its weights"))
    _selftest(_command(commands, "selftest", "check that no switch changes an answer, with this model on this machine"))
    _chat(_command(commands, "chat", "talk with a model on the terminal"))
    _generate(_command(commands, "generate", "continue prompts and print the texts"))
    return parser


def _command(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str) -> argparse.ArgumentParser:
    return commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".", allow_abbrev=False)


def _serve(parser: argparse.ArgumentParser) -> None:
    add_settings(parser)


def _watcher(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--url", metavar="URL", help="the server (default: by host and port of the settings)")
    parser.add_argument("--config", metavar="FILE", help="the server's settings: host, port, admin key")
    for flag in ("host", "port", "admin-key"):
        dest = f"server.{flag.replace('-', '_')}"
        parser.add_argument(f"--{flag}", dest=dest, metavar=flag.upper().replace("-", "_"), help=f"over the settings' {flag}")
    parser.set_defaults(switches={}, plugin_setting=[])
    return parser


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=_seconds, default=3.0, metavar="S", help="how long to watch (default: 3)")
    parser.add_argument("--json", action="store_true", help="as JSON")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be between 0.1 and 3600")
    return value


def _plugins(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_settings(parser, ("features",))


def _plan_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_settings(parser, ("model", "cache", "features"))


def _selftest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_settings(parser, ("model", "cache", "features"))


def _chat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    _sampling(parser)
    add_settings(parser, OFFLINE)


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help='texts to continue; "-" or none: one a line from standard input'
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    _sampling(parser)
    add_settings(parser, OFFLINE)


def _sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="new tokens at most (default: as many as there is room for)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: 1)")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text (default: drawn)")


if __name__ == "__main__":
    sys.exit(main())

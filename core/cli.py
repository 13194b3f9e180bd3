"""The `tokenbus` command: parsers here, bodies in `commands/`, imported when they run."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from .errors import TokenbusError, plain_text
from .settings_cli import add_fields, add_settings, make_config

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
    _new_plugin(_command(commands, "new-plugin", "write the skeleton of a plugin package, with a test"))
    _plan_memory(_command(commands, "plan-memory", "say what a model needs in memory, without loading its weights"))
    _selftest(_command(commands, "selftest", "check that no switch changes an answer, with this model on this machine"))
    _remote(_command(commands, "features", "show or switch a running server's plugins"), "on|off")
    _remote(_command(commands, "settings", "show or change a running server's live settings"), "VALUE")
    _chat(_command(commands, "chat", "talk with a model on the terminal"))
    _generate(_command(commands, "generate", "continue prompts and print the texts"))
    _ab(_command(commands, "ab", "run experiments on a server: list, start, ramp, roll back, stop, report"))
    _replay(_command(commands, "replay", "run a recording's steps again and stop at the first difference"))
    _simulate(_command(commands, "simulate", "say what a recorded load would have met under other settings"))
    _trace(_command(commands, "trace", "write a recording as a timeline for Perfetto or chrome://tracing"))
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


def _new_plugin(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help='what --enable will call it: "terse", or "family.name"')
    parser.add_argument("--into", default=".", metavar="DIR", help="where its folder goes (default: here)")
    add_settings(parser, ())


def _plan_memory(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_settings(parser, ("model", "cache", "features"))


def _selftest(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_settings(parser, ("model", "cache", "features"))


def _remote(parser: argparse.ArgumentParser, value: str) -> None:
    parser.add_argument("changes", nargs="*", metavar=f"NAME={value}", help="changes: all or none of them are made")
    parser.add_argument("--json", action="store_true", help="the server's answer as it is")
    parser.add_argument("--url", metavar="URL", help="where the server is (default: made from --host and --port)")
    add_settings(parser, ("server",), ("host", "port", "admin_key"))


def _recordings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recordings", nargs="+", metavar="FILE", help="a recording, or several parts of one in order")


def _replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", metavar="FILE", help="a recording of level full; each part stands for itself")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_fields(parser, "model", ("model", "dtype", "device", "kernels", "batch_invariant", "threads"), default="as recorded")
    add_fields(parser, "features", ("load",))


def _simulate(parser: argparse.ArgumentParser) -> None:
    _recordings(parser)
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="wishes",
        metavar="NAME=VALUE",
        help="what is to be different: token_budget=512, prefix_cache=off, chunked_prefill.chunk_size=64 ...",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_fields(parser, "features", ("load",))


def _trace(parser: argparse.ArgumentParser) -> None:
    _recordings(parser)
    parser.add_argument("-o", "--output", required=True, metavar="FILE", help="where the JSON goes")
    add_fields(parser, "features", ())


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


def _ab(parser: argparse.ArgumentParser) -> None:
    from .experiments.report import add_arguments

    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    _ab_verb(verbs, "list", "show how experiments stand")
    start = _ab_verb(verbs, "start", "begin a new run")
    start.add_argument(
        "--traffic", type=float, metavar="SHARE", help="share of units that take part, 0 to 1 (default: as set up)"
    )
    ramp = _ab_verb(verbs, "ramp", "let more units take part, or fewer; nobody changes arms")
    ramp.add_argument("traffic", type=float, metavar="SHARE", help="0 to 1")
    _ab_verb(verbs, "rollback", "give everybody the control's switches, until it is stopped")
    _ab_verb(verbs, "stop", "end a run, and put back switches as they were")
    report = _command(verbs, "report", "say what differs between an experiment's arms, and how sure that is")
    add_arguments(report)
    report.set_defaults(config=None, switches={}, plugin_setting=[])


def _ab_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, summary: str) -> argparse.ArgumentParser:
    parser = _command(verbs, name, summary)
    if name == "list":
        parser.add_argument("--json", action="store_true", help="as JSON")
    else:
        parser.add_argument("name", metavar="NAME", help="the experiment's name in tokenbus.toml")
    return _watcher(parser)


def _sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="new tokens at most (default: as many as there is room for)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy (default: 1)")
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text (default: drawn)")


if __name__ == "__main__":
    sys.exit(main())

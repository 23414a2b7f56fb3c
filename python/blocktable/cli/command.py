"""The command `blocktable`: which subcommand, and what its end means to a shell.

Before: a shell, or `python -m blocktable`. After: `generate.py`, `serve.py`, `replay.py`, `top.py`, or `blocktable.bench`; what
needs torch is loaded only when it runs.
Always: bad input ends with one line (and one of usage, if it is no option or no number) and exit code 2, an interrupt with 130
(a termination with 143), and no traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from ..errors import BlocktableError
from . import generate_options
from . import key as key_command
from . import replay as replay_command
from . import serve as serve_command
from . import top as top_command
from .interrupts import Interrupted, interruptible

DESCRIPTION = "Serve language models from a paged KV cache, and measure how well that goes."
EPILOG = """\
examples:
  blocktable generate --demo                         eight chat prompts with one system prompt
  blocktable generate "Why is the sky blue?"         one prompt of your own
  blocktable generate --help                         every option
  blocktable serve smollm2                           OpenAI's API on http://127.0.0.1:8000
  blocktable bench scheduler                         plan and commit, timed (needs no torch)
  blocktable top                                     a running server's pool, steps and requests (needs no torch)
  blocktable replay FILE                             a recorded schedule or a crash report, again (needs no torch)
"""

Run = Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: of the process); returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = make_parser(given).parse_args(given)
    run: Run = options.run
    try:
        with interruptible():
            return run(options)
    except Interrupted as interrupt:
        print("interrupted", file=sys.stderr)
        return interrupt.exit_code
    except BlocktableError as error:
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        print(f"blocktable: error: {error}{notes}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read our output has gone, which is no fault: `blocktable … | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def make_parser(given: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of the whole command. `given` tells which subcommand's options are wanted, so that no other is loaded."""
    parser = argparse.ArgumentParser(
        prog="blocktable", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"blocktable {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    generate = commands.add_parser(
        "generate",
        usage="%(prog)s [options] [PROMPT ...]",
        help="answer prompts, streaming, and report how the KV blocks were used",
        description=generate_options.DESCRIPTION,
        epilog=generate_options.EPILOG,
        formatter_class=generate_options.HelpFormatter,
    )
    generate_options.add_options(generate)
    generate.set_defaults(run=_run_generate)
    serve = commands.add_parser(
        "serve",
        usage="%(prog)s [options] [MODEL]",
        help="serve a model over OpenAI's API; see blocktable serve --help",
        description=serve_command.DESCRIPTION,
        epilog=serve_command.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    if "serve" in given[:1]:
        serve_command.add_options(serve)
    serve.set_defaults(run=serve_command.run)
    bench = commands.add_parser("bench", help="measure the core or the engine; see blocktable bench --help")
    if "bench" in given[:1]:
        from ..bench import command as bench_command

        bench_command.add_subcommands(bench)
    bench.set_defaults(run=_run_bench)
    key = commands.add_parser("key", help="draw an API key for a tenant of a server", description=key_command.DESCRIPTION)
    key_command.add_options(key)
    key.set_defaults(run=key_command.run)
    replay = commands.add_parser(
        "replay", help="make the calls of a recorded schedule again", description=replay_command.DESCRIPTION
    )
    replay_command.add_options(replay)
    replay.set_defaults(run=replay_command.run)
    top = commands.add_parser("top", help="show what a running server is doing", description=top_command.DESCRIPTION)
    top_command.add_options(top)
    top.set_defaults(run=top_command.run)
    return parser


def _run_generate(options: argparse.Namespace) -> int:
    from . import generate

    return generate.run(options)


def _run_bench(options: argparse.Namespace) -> int:
    from ..bench import command as bench_command

    return bench_command.run(options)

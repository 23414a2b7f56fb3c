"""The options of `blocktable generate`, with their defaults taken from the records that they fill.

Before: `command.py` builds the parser. After: `generate.py` reads the namespace. Nothing here needs torch, so `--help` is
instant and works without the engine.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from typing import Any

from ..engine.config import ATTENTION_BACKENDS, DTYPES, HASH_ALGORITHMS, LINEAR_BACKENDS, EngineConfig
from ..model.small_model import SMALL_MODEL

DESCRIPTION = """\
Answer prompts with a model: all of them at once, each answer shown as it comes, one after the other.
Then a table of the requests, and a report of how the KV blocks were used.
"""

EPILOG = """\
examples:
  blocktable generate --demo
      eight chat prompts that share a system prompt, on the small model
  blocktable generate "Why is the sky blue?" "What is a comet?" --max-tokens 64
      two prompts of your own
  blocktable generate --model ./my-model --prompts-file prompts.txt --temperature 0.7 --top-p 0.9
      a local model in Hugging Face's layout, one prompt a line
  blocktable generate --model model.gguf --raw "Once upon a time" --json
      plain continuation, without a chat template; one JSON object for machines

exit codes: 0 all answered, 1 a request ended with an error, 2 bad input, 130 interrupted
"""

MAX_TOKENS = 128
TEMPERATURE = 0.0

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the examples as they are and shows each option's default."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help
        # By identity: 0 is a default worth showing, and equals False.
        has_none = any(action.default is nothing for nothing in (None, False, argparse.SUPPRESS))
        if not text or has_none or not action.option_strings:
            return text
        return f"{text} (default: %(default)s)"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` every option of `generate`."""
    _add_prompts(parser)
    _add_sampling(parser.add_argument_group("sampling"))
    _add_engine(parser.add_argument_group("engine"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    output.add_argument("--quiet", action="store_true", help="say nothing about loading on standard error")


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options that `EngineConfig` takes, but for the model; those that were left out are left out."""
    names = {field.name for field in fields(EngineConfig)} - {"model"}
    given = vars(options)
    return {name: given[name] for name in names if given.get(name) is not None}


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompts; none = standard input, one a line")
    group = parser.add_argument_group("model and prompts")
    group.add_argument(
        "--model",
        default=SMALL_MODEL,
        help=f"directory in Hugging Face's layout, hub id, or .gguf file; {SMALL_MODEL!r} is SmolLM2-135M-Instruct",
    )
    group.add_argument("--prompts-file", metavar="FILE", help="a prompt a line, empty lines left out; - is standard input")
    group.add_argument("--demo", action="store_true", help="eight built-in chat prompts that share a system prompt")
    group.add_argument("--system", metavar="TEXT", help="system prompt of every chat")
    group.add_argument(
        "--raw", action="store_true", help="give prompts to the model as they are, even if it has a chat template"
    )


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help="output tokens at most")
    group.add_argument("--min-tokens", type=int, default=0, metavar="N", help="output tokens before anything may end the text")
    group.add_argument("--temperature", type=float, default=TEMPERATURE, metavar="X", help="0 always takes the best token")
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="sample from the N best tokens, 0 = from all")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample from the best tokens of this probability")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="least probability, as a share of the best one's")
    group.add_argument("--presence-penalty", type=float, default=0.0, metavar="X", help="against tokens of the answer so far")
    group.add_argument(
        "--frequency-penalty", type=float, default=0.0, metavar="X", help="the same, for each time that it has them"
    )
    group.add_argument("--repetition-penalty", type=float, default=1.0, metavar="X", help="against tokens of prompt and answer")
    group.add_argument(
        "--logit-bias", type=_mapping, metavar="JSON", help='what is added to the logits of tokens, as {"198": -100}'
    )
    group.add_argument("--bad-words", action="append", metavar="TEXT", help="text that no answer holds; may be repeated")
    group.add_argument("--allowed-token-ids", type=int, nargs="+", metavar="ID", help="the only tokens of answers")
    group.add_argument(
        "--logprobs", type=int, metavar="N", help="with --json, log probabilities of each token and of the N best at its place"
    )
    group.add_argument(
        "--structured-outputs", type=_mapping, metavar="JSON", help='the shape of answers, as {"choice": ["yes", "no"]}'
    )
    group.add_argument("--stop", action="append", metavar="TEXT", help="end an answer before this text; may be repeated")
    group.add_argument("--stop-token-ids", type=int, nargs="+", metavar="ID", help="end an answer with one of these tokens")
    group.add_argument("--ignore-eos", action="store_true", help="go on behind the model's own end token")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    default = {field.name: field.default for field in fields(EngineConfig)}

    def number(flag: str, text: str, kind: Any = int, metavar: str = "N") -> None:
        name = flag.removeprefix("--").replace("-", "_")
        group.add_argument(flag, type=kind, default=default[name], metavar=metavar, help=text)

    group.add_argument("--tokenizer", metavar="PLACE", help="where the tokenizer is, if not with the model")
    group.add_argument("--dtype", choices=DTYPES, default=default["dtype"], help="of weights and KV rows; auto = best here")
    group.add_argument("--device", default=default["device"], help="auto, cpu, cuda, cuda:1, …")
    group.add_argument(
        "--linear-backend",
        choices=LINEAR_BACKENDS,
        default=default["linear_backend"],
        help="on a CPU; auto = best here",
    )
    group.add_argument(
        "--attention-backend",
        choices=ATTENTION_BACKENDS,
        default=default["attention_backend"],
        help="the kernels; auto = by device",
    )
    number("--max-model-len", "prompt and output tokens of one request at most; default: what the model was made for")
    number("--block-size", "tokens a KV block")
    number("--num-blocks", "KV blocks in all; default: by memory")
    number("--kv-cache-memory-bytes", "bytes for the KV blocks, also as 512M or 2G", _bytes, "BYTES")
    number("--memory-share", "share of free memory for the KV blocks; default: by device", float, "X")
    number("--max-num-seqs", "requests that run at once, at most")
    number("--max-num-batched-tokens", "tokens of one step, prompts and outputs together, at most")
    number("--max-logprobs", "most that --logprobs may ask for")
    number("--max-waiting", "requests that wait in the queue, at most")
    number("--long-prefill-threshold", "prompt tokens of one request in a step, at most, 0 = no limit")
    number("--overlap-depth", "2 = plan the next step while the model runs")
    number("--seed", "where the random numbers begin")
    number("--num-threads", "CPU threads; default: torch's choice")
    group.add_argument(
        "--kv-events-config",
        type=_mapping,
        metavar="JSON",
        help='publish KV events, as {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}; default: publish none',
    )
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=default["enable_prefix_caching"],
        help="reuse the KV blocks of equal prompt beginnings",
    )
    group.add_argument(
        "--enable-partial-hits",
        action=argparse.BooleanOptionalAction,
        default=default["enable_partial_hits"],
        help="copy shared rows of the block in which a prompt departs",
    )
    group.add_argument(
        "--hash-algorithm",
        choices=HASH_ALGORITHMS,
        default=default["hash_algorithm"],
        help="names KV blocks; sha256_cbor and vllm_sha256 are vLLM's sha256_cbor and sha256",
    )
    group.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        default=default["cuda_graphs"],
        help="on CUDA, capture steps of single tokens as graphs",
    )
    group.add_argument(
        "--self-check",
        action=argparse.BooleanOptionalAction,
        default=default["self_check"],
        help="compare with the model's own attention when loading",
    )


def _mapping(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object")
    return value


def _bytes(text: str) -> int:
    scale = _UNITS.get(text[-1:].upper(), 1)
    digits = text[:-1] if scale > 1 else text
    if not digits.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes (1000000, 512M, 2G)")
    return int(digits) * scale

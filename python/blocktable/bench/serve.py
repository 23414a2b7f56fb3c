"""Times servers under many streams: what a token costs the server, and what the streams cost the engine's steps.

Before: `blocktable bench serve`. After: a row for each case. Answers are checked before anything is timed, and counted after.
CPU time is that of the server's processes, read from outside; the clients are in this process and cost some of the machine too.
"""

import argparse
import asyncio
import json
import os
import re
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..errors import InvalidInputError
from ..open_files import open_as_many_as_allowed
from .command import count
from .plain_checkpoint import write_plain_checkpoint
from .row import Row, check, with_peers
from .server_under_test import Server, blocktable_server, counting_server, vllm_server
from .stream_client import Answer, ask_all, get

SUMMARY = """Serve streams over HTTP: CPU us a token of the server, and of the engine. Needs the extra `server`, and Linux.

case load: an engine whose model takes --step-ms a step and counts; --clients streams at once, and the same not streamed
  server_us, engine_us   CPU of the server's process, and of the engine's, for each token streamed; alone_… without streams
  events_per_token       below 1 where the machine is too slow for all, and tokens come together
  step_cpu_us            CPU of plan and commit together, p50 and p99 of all steps; alone_… without streams
  late_ms                from one step to the next, less --step-ms; alone_… without streams
case chat, with --model: --clients at once, chats with the prompts of --prompts (a JSON line each), greedy, --output tokens
  requests_per_s, tokens_per_s, server_us, engine_us (the model's work is in it), first_ms: to the first text of the answer
  --peer-python PYTHON   vLLM's server, from the Python that has it, runs the same before ours, on all CPUs too, with 2 GiB
                         for its KV cache, unless VLLM_CPU_NUM_OF_RESERVED_CPU and VLLM_CPU_KVCACHE_SPACE say otherwise
  --url URL --process-id N   a server that runs already is measured in its place"""

TABLE = (
    "case", "clients", "output", "step_ms", "server_us", "engine_us", "events_per_token", "alone_server_us", "alone_engine_us",
    "step_cpu_us_p50", "step_cpu_us_p99", "alone_step_cpu_us_p50", "alone_step_cpu_us_p99", "ratio_step_cpu_us_p99",
    "late_ms_p50", "late_ms_p99", "alone_late_ms_p99", "requests_per_s", "tokens_per_s", "first_ms_p50",
    "peer", "peer_requests_per_s", "peer_tokens_per_s", "peer_server_us", "peer_engine_us", "peer_first_ms_p50",
    "ratio_requests_per_s", "ratio_server_us",
)  # fmt: skip

BLOCK_SIZE = 16
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

Body = dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    """How many, how long, over what."""
    parser.add_argument("--clients", type=count, help="streams at once (1000; 32 with --model)")
    parser.add_argument("--output", type=count, help="output tokens each (400; 64 with --model)")
    parser.add_argument("--step-ms", type=float, default=25.0, help="what a step of the counting model takes (25)")
    parser.add_argument("--model", help="directory or hub id, or smollm2: real chats in place of the counting model")
    parser.add_argument("--max-model-len", type=count, help="tokens of prompt and answer together (the model's own)")
    parser.add_argument("--dtype", default="float32", help="of the model (float32)")
    parser.add_argument("--prompts", metavar="FILE", help="JSON lines: a text, or an object with `turns`")
    parser.add_argument("--requests", type=count, help="chats in all (4 for each client)")
    parser.add_argument("--peer-python", default=os.environ.get("BLOCKTABLE_PEER_PYTHON"), help="a Python that has vLLM")
    parser.add_argument("--url", help="measure this server in place of a peer's")
    parser.add_argument("--process-id", type=count, help="its first process")


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """One row."""
    open_as_many_as_allowed()
    if options.model is None:
        clients, output = (8, 20) if options.smoke else (options.clients or 1000, options.output or 400)
        yield _load_row(clients, output, 2.0 if options.smoke else options.step_ms)
    else:
        yield _chat_row(options)


def _load_row(clients: int, output: int, step_ms: float) -> Row:
    with TemporaryDirectory() as name:
        folder = Path(name)
        from .counting_engine import write_tokenizer

        write_tokenizer(folder)
        alone = _load(folder, clients, output, step_ms, is_streamed=False)
        beside = _load(folder, clients, output, step_ms, is_streamed=True)
    row: Row = {"bench": "serve", "case": "load", "clients": clients, "output": output, "step_ms": step_ms}
    row |= beside | {f"alone_{name}": value for name, value in alone.items()}
    theirs, ours = alone["step_cpu_us_p99"], beside["step_cpu_us_p99"]
    return row | {"ratio_step_cpu_us_p99": round(ours / theirs, 3) if theirs else None}


def _load(folder: Path, clients: int, output: int, step_ms: float, *, is_streamed: bool) -> dict[str, float]:
    """The figures of one server from its start to its end."""
    times_file = folder / f"times_{is_streamed}"
    options = {
        "num_blocks": 1 + clients * (2 + output // BLOCK_SIZE),
        "max_num_seqs": clients,
        "max_num_batched_tokens": max(4096, 2 * clients),
        "overlap_depth": 2,
        "counting_step_ms": step_ms,
        "counting_times_file": str(times_file),
    }
    bodies = [_completion([place % 200], output, is_streamed=is_streamed) for place in range(clients)]
    with counting_server(folder, options) as server:
        _check_streams(server, COMPLETIONS, [body | {"max_tokens": 20} for body in bodies[:2]])
        figures, answers = _timed(server, COMPLETIONS, bodies, clients)
        texts = {place % 200: answer.text for place, answer in enumerate(answers)}
        check(holds=all(answer.text == texts[place % 200] for place, answer in enumerate(answers)), what="equal prompts differ")
        check(holds=all(answer.num_tokens == output for answer in answers), what="not every answer has its full length")
        metrics = get(f"{server.admin_url}/metrics")
    for quantile in ("0.5", "0.99"):
        figures[f"step_cpu_us_p{float(quantile) * 100:g}"] = round(_quantile(metrics, quantile) * 1e6, 1)
    began_ns = np.array(array("q", times_file.read_bytes())[-output:])
    late_ms = np.diff(began_ns) / 1e6 - step_ms
    for share in (50, 99):
        figures[f"late_ms_p{share}"] = round(float(np.percentile(late_ms, share)), 3)
    return figures


def _chat_row(options: argparse.Namespace) -> Row:
    clients, output = options.clients or (2 if options.smoke else 32), options.output or (4 if options.smoke else 64)
    num_requests = options.requests or (clients if options.smoke else 4 * clients)
    bodies = [_chat(text, output) for text in _texts(options.prompts, num_requests)]
    row: Row = {"bench": "serve", "case": "chat", "clients": clients, "output": output, "model": options.model}
    row |= {"dtype": options.dtype, "requests": num_requests}
    from ..model.small_model import resolve_shorthand

    model = resolve_shorthand(options.model)
    peers = []
    with TemporaryDirectory() as folder:
        peer = _peer(options, model, clients, Path(folder))
        if peer is not None:
            with peer as server:
                peers.append(row | {"peer": server.name} | _chats(server, bodies, output, clients))
    given = {"dtype": options.dtype, "max_num_seqs": clients}
    given |= {} if options.max_model_len is None else {"max_model_len": options.max_model_len}
    with blocktable_server(model, given) as server:
        row |= _chats(server, bodies, output, clients)
    same, figures = (
        ["clients", "output", "requests"],
        ["requests_per_s", "tokens_per_s", "server_us", "engine_us", "first_ms_p50"],
    )
    return with_peers(row, peers, same, figures)


def _peer(options: argparse.Namespace, model: str, clients: int, folder: Path) -> AbstractContextManager[Server] | None:
    """`folder` is for a model that the peer cannot read as it is."""
    if options.url is not None:
        if options.process_id is None:
            raise InvalidInputError("process_id", None, "goes with url: the number of the server's first process")
        return nullcontext(Server(options.url, options.url.rstrip("/"), options.process_id))
    if options.peer_python is None:
        return None
    if model.endswith(".gguf"):
        write_plain_checkpoint(model, folder)
        model = str(folder)
    flags = ["--max-num-seqs", str(clients), "--served-model-name", "any"]
    flags += [] if options.max_model_len is None else ["--max-model-len", str(options.max_model_len)]
    return vllm_server(options.peer_python, model, options.dtype, flags)


def _chats(server: Server, bodies: Sequence[Body], output: int, clients: int) -> Row:
    named = [body | {"model": _model_of(server)} for body in bodies]
    _check_streams(server, CHATS, named[:2])
    figures, answers = _timed(server, CHATS, named, clients)
    check(holds=all(answer.num_tokens == output for answer in answers), what=f"{server.name}: not every answer is whole")
    return {**figures}


def _check_streams(server: Server, path: str, bodies: Sequence[Body]) -> None:
    """Also the warm-up: a stream says what the same request says in one piece. One at a time: a batch may round otherwise."""
    for body in bodies:
        whole = {name: value for name, value in body.items() if name != "stream_options"} | {"stream": False}
        streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
        one, other = (asyncio.run(ask_all(server.url, path, [asked], 1))[0] for asked in (whole, streamed))
        same = (one.text, one.num_tokens) == (other.text, other.num_tokens)
        check(holds=same, what=f"{server.name}: streamed {other.text!r}, in one piece {one.text!r}")


def _timed(server: Server, path: str, bodies: Sequence[Body], clients: int) -> tuple[dict[str, float], list[Answer]]:
    cpu, begun = server.cpu(), time.monotonic()
    answers = asyncio.run(ask_all(server.url, path, bodies, clients))
    elapsed_s, used = time.monotonic() - begun, server.cpu() - cpu
    num_tokens = sum(answer.num_tokens for answer in answers)
    figures = {
        "server_us": round(used.front_s / num_tokens * 1e6, 2),
        "engine_us": round(used.engine_s / num_tokens * 1e6, 2),
        "events_per_token": round(sum(answer.num_events for answer in answers) / num_tokens, 3),
        "requests_per_s": round(len(answers) / elapsed_s, 2),
        "tokens_per_s": round(num_tokens / elapsed_s, 1),
        "first_ms_p50": round(float(np.median([answer.first_s - answer.asked_s for answer in answers])) * 1e3, 1),
    }
    return figures, answers


def _completion(prompt: list[int], output: int, *, is_streamed: bool) -> Body:
    body: Body = {"prompt": prompt, "max_tokens": output, "temperature": 0, "stream": is_streamed}
    return body | {"stream_options": {"include_usage": True}} if is_streamed else body


def _chat(text: str, output: int) -> Body:
    messages = [{"role": "user", "content": text}]
    body: Body = {"messages": messages, "max_tokens": output, "temperature": 0, "ignore_eos": True}
    return body | {"stream": True, "stream_options": {"include_usage": True}}


def _texts(path: str | None, wanted: int) -> list[str]:
    """The prompts of a file from the start, again with a number before them if there are too few."""
    if path is None:
        found = [f"Tell me {number} facts about the number {number}." for number in range(2, 102)]
    else:
        try:
            with open(path, encoding="utf-8") as lines:
                found = [_first_text(json.loads(line)) for line in lines if line.strip()]
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise InvalidInputError("prompts", path, f"must be JSON lines of texts or objects with turns ({error!r})") from None
    rounds = -(-wanted // len(found))
    return [f"{turn} {text}" if turn else text for turn in range(rounds) for text in found][:wanted]


def _first_text(line: Any) -> str:
    text = line if isinstance(line, str) else line["turns"][0]
    if not isinstance(text, str):
        raise TypeError("no text")
    return text


def _model_of(server: Server) -> str:
    name: str = json.loads(get(f"{server.url}/v1/models"))["data"][0]["id"]
    return name


def _quantile(metrics: str, quantile: str) -> float:
    """Of the CPU time of plan and commit, in seconds."""
    for line in metrics.splitlines():
        if line.startswith("blocktable:scheduler_call_seconds") and 'call="both_cpu"' in line:
            if re.search(rf'quantile="{quantile}"', line):
                return float(line.split()[-1])
    return float("nan")

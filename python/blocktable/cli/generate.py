"""`blocktable generate`: prompts in, answers out as they come, then what it took.

Before: `command.py` has parsed the options. After: standard output holds answers, table and report (or one JSON object);
standard error says what is being loaded. Always: however it ends, every KV block is given back, and that is said.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blocktable

from ..engine.outputs import RequestOutput
from ..engine.token_logprobs import TokenLogprobs
from ..errors import InvalidInputError
from ..model.small_model import resolve_shorthand
from ..sampling.params import SamplingParams
from .answer_printer import AnswerPrinter
from .demo_prompts import QUESTIONS, SYSTEM
from .generate_options import engine_options
from .interrupts import Interrupted
from .request_table import as_json, format_table

if TYPE_CHECKING:
    from ..engine.batch import Stream
    from ..engine.llm import LLM


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user wants answered."""

    prompts: list[str]
    system: str | None
    is_raw: bool


def run(options: argparse.Namespace) -> int:
    """Do what the options say; returns the exit code."""
    start_engine = blocktable.LLM  # a missing extra is told before a missing model
    params = _sampling(options)
    asked = _read_asked(options)
    model = resolve_shorthand(options.model)
    with _told(is_quiet=options.quiet):
        llm = start_engine(model, **engine_options(options))
    try:
        return _answer(llm, asked, params, is_json=options.json)
    except Interrupted as interrupt:
        print(f"\ninterrupted: {_free(llm)}", file=sys.stderr)
        return interrupt.exit_code
    finally:
        llm.shutdown()


def _answer(llm: LLM, asked: Asked, params: SamplingParams, *, is_json: bool) -> int:
    begun = time.perf_counter()
    with _start(llm, asked, params) as stream:
        outputs = _collect(stream, asked, is_shown=not is_json)
    elapsed_s = time.perf_counter() - begun
    if is_json:
        _print_json(llm, asked, outputs, elapsed_s)
    else:
        _print_tables(llm, asked, outputs, elapsed_s)
    return 1 if any(output.outputs[0].finish_reason == "error" for output in outputs) else 0


def _start(llm: LLM, asked: Asked, params: SamplingParams) -> Stream:
    if asked.is_raw or not llm.has_chat_template:
        if asked.system is not None:
            raise InvalidInputError(
                "system", asked.system, "needs a chat: leave out --raw, or use a model with a chat template"
            )
        return llm.stream(asked.prompts, params)
    before = [] if asked.system is None else [{"role": "system", "content": asked.system}]
    return llm.stream_chat([[*before, {"role": "user", "content": prompt}] for prompt in asked.prompts], params)


def _collect(stream: Stream, asked: Asked, *, is_shown: bool) -> list[RequestOutput]:
    """Show the pieces as they come; returns the whole outputs in the order of the prompts."""
    count = len(asked.prompts)
    headings = [f"[{place}/{count}] {prompt}" for place, prompt in enumerate(asked.prompts, start=1)]
    printer = AnswerPrinter(headings, sys.stdout) if is_shown else None
    pieces: list[list[str]] = [[] for _ in headings]
    token_ids: list[list[int]] = [[] for _ in headings]
    logprobs: dict[int, TokenLogprobs] = {}
    whole: dict[int, RequestOutput] = {}
    for place, output in stream:
        answer = output.outputs[0]
        pieces[place].append(answer.text)
        token_ids[place].extend(answer.token_ids)
        if answer.token_logprobs is not None:
            logprobs.setdefault(place, TokenLogprobs(answer.token_logprobs.num_best)).extend(answer.token_logprobs)
        if printer is not None:
            printer.show(place, answer.text, is_last=output.finished)
        if output.finished:
            told = logprobs.get(place)
            answer = replace(answer, text="".join(pieces[place]), token_ids=token_ids[place], token_logprobs=told)
            whole[place] = replace(output, outputs=[answer])
    return [whole[place] for place in range(count)]


def _print_tables(llm: LLM, asked: Asked, outputs: list[RequestOutput], elapsed_s: float) -> None:
    print(format_table(asked.prompts, outputs))
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    print(f"{len(outputs)} requests, {tokens} output tokens in {elapsed_s:.2f} s: {tokens / elapsed_s:.1f} tokens/s\n")
    print(llm.kv_report())


def _print_json(llm: LLM, asked: Asked, outputs: list[RequestOutput], elapsed_s: float) -> None:
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    record: dict[str, Any] = {
        "model": llm.config.model,
        "requests": [as_json(prompt, output) for prompt, output in zip(asked.prompts, outputs)],
        "elapsed_s": round(elapsed_s, 6),
        "output_tokens_per_s": round(tokens / elapsed_s, 3),
        "kv": llm.kv_report().as_dict(),
    }
    print(json.dumps(record, ensure_ascii=False))


def _free(llm: LLM) -> str:
    """End everything, recount, and say what is free."""
    llm.abort_all()
    llm.scheduler.audit()
    stats = llm.scheduler.stats()
    return f"{stats['aborted']} requests aborted, {stats['free_blocks']} of {stats['num_blocks'] - 1} KV blocks free: all freed"


def _sampling(options: argparse.Namespace) -> SamplingParams:
    if options.logprobs is not None and not options.json:
        raise InvalidInputError("logprobs", options.logprobs, "are shown with --json only")
    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        max_tokens=options.max_tokens,
        min_tokens=options.min_tokens,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=options.repetition_penalty,
        logit_bias=options.logit_bias,
        bad_words=options.bad_words,
        allowed_token_ids=options.allowed_token_ids,
        logprobs=options.logprobs,
        structured_outputs=options.structured_outputs,
    )


def _read_asked(options: argparse.Namespace) -> Asked:
    """The prompts from the one place that was named. Raises `InvalidInputError` for none, or for two places."""
    places = [bool(options.prompts), options.prompts_file is not None, options.demo]
    if sum(places) > 1:
        raise InvalidInputError("prompts", "several places", "give prompts, or --prompts-file, or --demo")
    if options.demo:
        if options.raw:
            raise InvalidInputError("raw", options.raw, "--demo is a chat")
        return Asked(list(QUESTIONS), options.system or SYSTEM, is_raw=False)
    prompts = list(options.prompts) or _read_lines(options.prompts_file)
    return Asked(prompts, options.system, is_raw=options.raw)


def _read_lines(name: str | None) -> list[str]:
    if name in (None, "-") and sys.stdin.isatty():
        raise InvalidInputError("prompts", None, "give prompts, --prompts-file, or --demo; see blocktable generate --help")
    try:
        text = sys.stdin.read() if name in (None, "-") else Path(str(name)).read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInputError("prompts_file", name, f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InvalidInputError("prompts_file", name, f"must be UTF-8: {error.reason} at byte {error.start}") from None
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise InvalidInputError("prompts", "", "must hold at least one prompt")
    return prompts


@contextmanager
def _told(*, is_quiet: bool) -> Iterator[None]:
    """Say on standard error what is being loaded."""
    log = logging.getLogger("blocktable")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("blocktable: %(message)s"))
    handler.setLevel(logging.WARNING if is_quiet else logging.INFO)
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(before)
        log.removeHandler(handler)

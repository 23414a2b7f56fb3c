"""Owns the ways of running the same prompts that must all give the same text: the options of each, and how requests arrive.

Before: `reference.Comparison` asks for answers. After: output tokens in the order of the prompts, from one fresh engine, whose
scheduler is audited and found empty at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from blocktable import LLM, AsyncLLM, RequestOutput, SamplingParams

from .reference import Answer, Ids

Arrive = Callable[[LLM, list[Any], list[SamplingParams]], list[RequestOutput]]


def all_at_once(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(prompts, params)


def one_by_one(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
    return [llm.generate(prompt, one)[0] for prompt, one in zip(prompts, params, strict=True)]


def warm(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
    """The same prompts a second time: the second answers count."""
    llm.generate(prompts, params)
    return llm.generate(prompts, params)


def in_the_middle(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
    """A request every third step, while those before it run."""
    places: dict[str, int] = {}
    found: dict[int, RequestOutput] = {}
    steps = 0
    while len(found) < len(prompts):
        if steps % 3 == 0 and len(places) < len(prompts):
            place = len(places)
            places[llm.add_request(prompts[place], params[place])] = place
        for output in llm.step():
            found[places[output.request_id]] = output
        steps += 1
    assert not llm.has_unfinished_requests()
    return [found[place] for place in range(len(prompts))]


@dataclass(frozen=True)
class Way:
    """Options of the engine, the order of arrival, how often each prompt is asked, and what the run must have met to be worth
    its name."""

    options: dict[str, Any] = field(default_factory=dict)
    arrive: Arrive = all_at_once
    times: int = 1
    min_preemptions: int = 0
    is_warm: bool = False
    stride: int = 1  # outside a soak, only every so many prompts

    def of(self, prompts: list[Ids], *, soak: bool) -> list[Ids]:
        """Those that are run this way, of prompts or of what belongs to them."""
        return prompts * self.times if soak else (prompts * self.times)[:: self.stride]


def run_way(way: Way, model: Any, report: dict[str, int], **base: Any) -> Answer:
    """The answers of `model` run this way. `report` gets the preemptions and cached tokens of the first run."""

    def answer(prompts: list[Ids], counts: list[int]) -> list[Ids]:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for count in counts]
        with LLM(model, **(base | way.options)) as llm:
            outputs = way.arrive(llm, [{"prompt_token_ids": ids} for ids in prompts], params)
            check_empty(llm)
            report.setdefault("preemptions", llm.kv_report().preemptions)
            report.setdefault("cached", sum(output.num_cached_tokens or 0 for output in outputs))
        assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return answer


def check_empty(llm: LLM | AsyncLLM) -> None:
    """Nothing runs, nothing waits, every block is free, and all invariants hold."""
    scheduler = llm.scheduler
    scheduler.audit()
    stats = scheduler.stats()
    assert (stats["running"], stats["waiting"], stats["used_blocks"], stats["parked_blocks"]) == (0, 0, 0, 0)
    assert stats["free_blocks"] == stats["num_blocks"] - 1
    assert stats["submitted"] + stats["forks"] == stats["finished"] + stats["aborted"] + stats["queue_expired"]

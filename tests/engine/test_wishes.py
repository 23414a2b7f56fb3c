"""Promise: who says how it wants to be treated is treated so, through `LLM` and `AsyncLLM` alike: priority, tenant, deadlines;
and whatever the policy, the answers are the same."""

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from blocktable import LLM, AsyncLLM, InvalidInputError, RequestOutput, RequestOutputKind, UnknownOptionError
from blocktable.engine.config import POLICIES
from blocktable.engine.intake import Wishes

from .conftest import MakeAsync, MakeLLM
from .faults import turnstile
from .test_async_llm import greedy, read, settle
from .ways import check_empty

PROMPTS: list[Any] = [{"prompt_token_ids": list(range(first, first + 12))} for first in (1, 30, 60, 90)]
FINAL = RequestOutputKind.FINAL_ONLY


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_changes_no_answer(policy: str, make_llm: MakeLLM) -> None:
    right = make_llm().generate(PROMPTS, greedy())
    llm = make_llm(policy=policy, max_num_seqs=2)
    for output, other in zip(right, llm.generate(PROMPTS, greedy(), tenant="a", deadline_s=1000), strict=True):
        assert output.outputs[0].token_ids == other.outputs[0].token_ids
    check_empty(llm)
    assert llm.scheduler.config["policy"] == policy == llm.config.policy


def test_the_order_of_priorities(make_async: MakeAsync) -> None:
    """One row: those that wait are taken by priority, equals in the order of their coming."""
    engine = make_async(max_num_seqs=1, policy="priority", ageing_us=2**50)
    ended: list[int] = []

    async def ask(number: int, priority: int) -> None:
        await read(engine.generate(PROMPTS[number % 4], greedy(FINAL, max_tokens=3), priority=priority))
        ended.append(number)

    async def main() -> None:
        with turnstile(engine) as stile:
            first = asyncio.ensure_future(ask(0, 1000))
            await asyncio.to_thread(stile.let_in)
            others = [asyncio.ensure_future(ask(number, priority)) for number, priority in enumerate((5, 0, -3, 0, 7), 1)]
            await asyncio.sleep(0)
            stile.open()
            await asyncio.gather(first, *others)

    asyncio.run(main())
    assert ended == [0, 3, 2, 4, 1, 5]
    settle(engine)


def test_tenants_take_turns_by_weight(make_async: MakeAsync) -> None:
    """One row, and a flood of one tenant before the other comes: the other does not wait for the end of the flood."""
    engine = make_async(max_num_seqs=1, policy="fair", tenants={"paid": {"weight": 4}})
    ended: list[str] = []

    async def ask(number: int, tenant: str) -> None:
        await read(engine.generate(PROMPTS[number % 4], greedy(FINAL, max_tokens=3), tenant=tenant))
        ended.append(tenant)

    async def main() -> None:
        with turnstile(engine) as stile:
            flood = [asyncio.ensure_future(ask(number, "flood")) for number in range(8)]
            await asyncio.to_thread(stile.let_in)
            paid = [asyncio.ensure_future(ask(number, "paid")) for number in range(4)]
            await asyncio.sleep(0)
            stile.open()
            await asyncio.gather(*flood, *paid)

    asyncio.run(main())
    assert "flood" in ended[-3:], "four times the share: the flood waits"
    settle(engine)


def test_a_queue_deadline_refuses_who_was_not_admitted(make_async: MakeAsync) -> None:
    engine = make_async(max_num_seqs=1)

    async def main() -> tuple[list[RequestOutput], list[RequestOutput], list[RequestOutput]]:
        with turnstile(engine) as stile:
            first = asyncio.ensure_future(read(engine.generate(PROMPTS[0], greedy(), queue_deadline_s=1000)))
            await asyncio.to_thread(stile.let_in)
            late = asyncio.ensure_future(read(engine.generate(PROMPTS[1], greedy(), queue_deadline_s=1e-6)))
            patient = asyncio.ensure_future(read(engine.generate(PROMPTS[2], greedy(), queue_deadline_s=1000)))
            await asyncio.sleep(0)
            stile.open()
            return await first, await late, await patient

    first, late, patient = asyncio.run(main())
    assert (first[-1].outputs[0].finish_reason, patient[-1].outputs[0].finish_reason) == ("length", "length")
    assert [(output.outputs[0].finish_reason, list(output.outputs[0].token_ids)) for output in late] == [("refused", [])]
    settle(engine)
    assert engine.scheduler.stats()["queue_expired"] == 1


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "running"])
def test_a_deadline_aborts_wherever_it_is(waits: bool, make_async: MakeAsync) -> None:
    """In the line, and in the middle of a step: what came before stays, and the reason is told."""
    engine = make_async(max_num_seqs=1 if waits else 2)

    async def main() -> RequestOutput:
        with turnstile(engine) as stile:
            beside = asyncio.ensure_future(read(engine.generate(PROMPTS[0], greedy())))
            await asyncio.to_thread(stile.let_in)
            late = asyncio.ensure_future(read(engine.generate(PROMPTS[1], greedy(max_tokens=100), deadline_s=0.3)))
            await asyncio.sleep(0)
            for _ in range(3):
                stile.let_through()
                await asyncio.to_thread(stile.let_in)
            await asyncio.sleep(0.4)
            stile.open()
            assert (await beside)[-1].outputs[0].finish_reason == "length"
            return (await late)[-1]

    answer = asyncio.run(main()).outputs[0]
    assert (answer.finish_reason, answer.stop_reason) == ("abort", "deadline")
    assert len(answer.token_ids) <= (0 if waits else 4)
    settle(engine)


def test_llm_tells_the_same_ends(make_llm: MakeLLM) -> None:
    llm = make_llm(num_blocks=5)  # 32 tokens
    [refused] = llm.generate(PROMPTS[0], greedy(), queue_deadline_s=1e-6)
    assert (refused.outputs[0].finish_reason, refused.outputs[0].stop_reason) == ("refused", None)
    [late] = llm.generate(PROMPTS[0], greedy(), deadline_s=1e-6)
    assert (late.outputs[0].finish_reason, late.outputs[0].stop_reason) == ("abort", "deadline")
    [full] = llm.generate(PROMPTS[0], greedy(max_tokens=100))
    assert (full.outputs[0].finish_reason, full.outputs[0].stop_reason) == ("abort", "capacity")
    with llm.stream(PROMPTS[:2], greedy(), queue_deadline_s=1e-6) as stream:
        assert [output.outputs[0].finish_reason for _, output in stream] == ["refused"] * 2
    [chat] = llm.chat([{"role": "user", "content": "a"}], greedy(), deadline_s=1e-6)
    assert chat.outputs[0].finish_reason == "abort"
    llm.add_request(PROMPTS[0], greedy(), deadline_s=1e-6)
    assert [output.outputs[0].finish_reason for output in llm.step()] == ["abort"]
    check_empty(llm)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"priority": 1001}, InvalidInputError, "priority=1001"),
    ({"priority": True}, InvalidInputError, "priority=True"),
    ({"priority": 0.5}, InvalidInputError, "priority=0.5"),
    ({"priority": 1}, InvalidInputError, "must be 0 with policy fcfs"),
    ({"tenant": ""}, InvalidInputError, "tenant"),
    ({"tenant": 3}, InvalidInputError, "tenant"),
    ({"tenant": "é" * 129}, InvalidInputError, "tenant"),
    ({"tenant": "\ud800"}, InvalidInputError, "tenant"),
    ({"deadline_s": 0}, InvalidInputError, "deadline_s=0"),
    ({"deadline_s": -1.0}, InvalidInputError, "deadline_s=-1.0"),
    ({"deadline_s": float("nan")}, InvalidInputError, "deadline_s=nan"),
    ({"deadline_s": float("inf")}, InvalidInputError, "deadline_s=inf"),
    ({"queue_deadline_s": "1"}, InvalidInputError, "queue_deadline_s='1'"),
    ({"queue_deadline_s": True}, InvalidInputError, "queue_deadline_s=True"),
    ({"priorty": 1}, UnknownOptionError, "did you mean priority"),
]


def test_numbers_of_numpy_are_taken_as_python_s() -> None:
    wishes = Wishes(priority=np.int64(-3), queue_deadline_s=np.float32(0.5), deadline_s=np.int64(2))
    assert [wishes.priority, wishes.queue_deadline_s, wishes.deadline_s] == [-3, 0.5, 2.0]
    assert [type(one) for one in (wishes.priority, wishes.queue_deadline_s, wishes.deadline_s)] == [int, float, float]


@pytest.mark.parametrize("wishes, error, match", BAD, ids=[str(wishes) for wishes, _, _ in BAD])
def test_a_bad_wish_is_refused(wishes: dict[str, Any], error: type[Exception], match: str, llm: LLM, engine: AsyncLLM) -> None:
    with pytest.raises(error, match=match):
        llm.generate(PROMPTS, greedy(), **wishes)
    with pytest.raises(error, match=match):
        asyncio.run(read(engine.generate(PROMPTS[0], greedy(), **wishes)))
    check_empty(llm)
    settle(engine)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"policy": "lifo"}, "must be one of fcfs, priority"),
        ({"scheduling_policy": "priority"}, "scheduling_policy"),
        ({"ageing_us": 0}, "ageing_us=0"),
        ({"max_pass": -1}, "max_pass=-1"),
        ({"tenants": [1]}, "tenants"),
        ({"tenants": {"a": {"weight": 0}}}, "weight"),
        ({"tenants": {"a": {"wait": 1}}}, "wait"),
        ({"other_tenants": {"weight": 5000}}, "weight"),
    ],
)
def test_a_bad_rule_is_refused(options: dict[str, Any], match: str, make_llm: MakeLLM) -> None:
    with pytest.raises(InvalidInputError, match=match):
        make_llm(**options)


def test_time_is_counted_from_the_coming(make_async: MakeAsync) -> None:
    """Not from when the step thread got to it: a step that took longer than the deadline is no excuse."""
    engine = make_async()

    async def main() -> RequestOutput:
        with turnstile(engine) as stile:
            beside = asyncio.ensure_future(read(engine.generate(PROMPTS[0], greedy())))
            await asyncio.to_thread(stile.let_in)
            late = asyncio.ensure_future(read(engine.generate(PROMPTS[1], greedy(), queue_deadline_s=0.05)))
            await asyncio.sleep(0)
            time.sleep(0.1)
            stile.open()
            await beside
            return (await late)[-1]

    assert asyncio.run(main()).outputs[0].finish_reason == "refused"

"""Promise: `LLM` takes prompts in every shape, answers in their order, streams what `generate` would give, and tells how it
went; requests may be added, aborted and left at any time; engines share nothing."""

import gc
import operator
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import blocktable
from blocktable import LLM, RequestOutput, SamplingParams, engine
from blocktable.engine.step_loop import StepLoop
from blocktable.model.kv_memory import KVMemory

from .conftest import MakeLLM
from .faults import changing, faulty_model, loop_of
from .ways import check_empty

IDS = [[1, 2, 3], list(range(40, 60)), list(range(40, 70)), [90] * 9, [5], list(range(100, 164))]
PROMPTS = [{"prompt_token_ids": ids} for ids in IDS]
EIGHT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_prompts_come_in_every_shape(llm: LLM) -> None:
    text = "hello"
    ids = llm._open.tokenizer.encode(text)  # type: ignore[union-attr]
    shapes: list[Any] = [
        text,
        [text],
        (text,),
        {"prompt": text},
        [{"prompt": text}],
        {"prompt_token_ids": ids},
        {"prompt_token_ids": tuple(ids)},
        {"prompt_token_ids": np.array(ids, np.int32)},
        {"prompt_token_ids": np.array(ids, np.uint8)},
        {"prompt": text, "prompt_token_ids": ids},
    ]
    answers = [llm.generate(shape, EIGHT) for shape in shapes]
    assert len({tuple(answer[0].outputs[0].token_ids) for answer in answers}) == 1
    assert all(answer[0].prompt_token_ids == ids for answer in answers)
    assert [answer[0].prompt for answer in answers] == [text] * 5 + [None] * 4 + [text]
    assert all(answer[0].outputs[0].text == answers[0][0].outputs[0].text for answer in answers)
    assert llm.generate([], EIGHT) == []
    check_empty(llm)


def test_results_stand_in_the_order_of_the_prompts(make_llm: MakeLLM) -> None:
    """Whatever ends first: the lengths are such that the last ends first; and twice in one process, the second time fewer."""
    llm = make_llm()
    params = [SamplingParams(temperature=0, max_tokens=20 - 3 * place, ignore_eos=True) for place in range(len(PROMPTS))]
    outputs = llm.generate(PROMPTS, params)
    assert [output.prompt_token_ids for output in outputs] == IDS
    assert [len(tokens) for tokens in ids_of(outputs)] == [20, 17, 14, 11, 8, 5]
    assert ids_of(llm.generate(PROMPTS[:2], params[:2])) == ids_of(outputs[:2])
    assert len({output.request_id for output in outputs}) == len(PROMPTS)


def test_more_prompts_than_may_wait_are_fed_as_there_is_room(make_llm: MakeLLM) -> None:
    expected = ids_of(make_llm().generate(PROMPTS * 4, EIGHT))
    llm = make_llm(max_waiting=2, max_num_seqs=3)
    assert ids_of(llm.generate(PROMPTS * 4, EIGHT)) == expected
    check_empty(llm)


def test_a_progress_bar_counts_the_prompts(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(PROMPTS, EIGHT, use_tqdm=True)
    assert f"{len(PROMPTS)}/{len(PROMPTS)}" in capsys.readouterr().err
    llm.generate(PROMPTS, EIGHT)
    assert capsys.readouterr().err == ""


def test_a_stream_is_generate_in_pieces(make_llm: MakeLLM) -> None:
    llm = make_llm(num_blocks=24)
    whole = make_llm().generate(PROMPTS, EIGHT)
    pieces: dict[int, list[RequestOutput]] = {place: [] for place in range(len(PROMPTS))}
    for place, output in llm.stream(PROMPTS, EIGHT):
        pieces[place].append(output)
    for place, output in enumerate(whole):
        mine = pieces[place]
        assert [piece.finished for piece in mine] == [False] * (len(mine) - 1) + [True]
        assert [piece.outputs[0].finish_reason for piece in mine[:-1]] == [None] * (len(mine) - 1)
        assert [token for piece in mine for token in piece.outputs[0].token_ids] == output.outputs[0].token_ids
        assert "".join(piece.outputs[0].text for piece in mine) == output.outputs[0].text
        assert mine[-1].outputs[0].finish_reason == output.outputs[0].finish_reason
        assert mine[-1].metrics is not None
        assert mine[-1].metrics.num_generation_tokens == 8
    check_empty(llm)


@pytest.mark.parametrize("leave", ["close", "with", "drop"])
def test_a_stream_that_is_left_gives_its_blocks_back(leave: str, llm: LLM) -> None:
    stream = llm.stream(PROMPTS, LONG)
    next(stream)
    assert llm.scheduler.stats()["used_blocks"] > 0
    if leave == "close":
        stream.close()
    elif leave == "with":
        with stream:
            next(stream)
    else:
        del stream
    assert llm.scheduler.stats()["used_blocks"] == 0
    assert ids_of(llm.generate(PROMPTS[:1], EIGHT)) == ids_of(llm.generate(PROMPTS[:1], EIGHT))
    check_empty(llm)


def test_a_stream_that_is_never_read_gives_its_blocks_back(llm: LLM) -> None:
    stream = llm.stream(PROMPTS, LONG)
    assert llm.scheduler.num_waiting == len(PROMPTS)
    del stream
    llm.step()
    check_empty(llm)


INSIDE = ["roster.child_seed", "running_rows.RunningRows.take"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("inside", INSIDE)
def test_a_stream_may_be_dropped_by_the_garbage_collector(
    inside: str, depth: int, make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That comes in the middle of whatever its thread does: here while a request is queued, or while tokens are taken."""
    check_collected(make_llm(overlap_depth=depth), inside, monkeypatch)


# It is freed by force.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_stream_that_waits_for_its_own_thread_is_caught(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepLoop, "drop", lambda loop, numbers: [loop.abort(number) for number in numbers])
    with pytest.raises(AssertionError):
        check_collected(make_llm(), INSIDE[0], monkeypatch, patience_s=2)


def check_collected(llm: LLM, inside: str, monkeypatch: pytest.MonkeyPatch, patience_s: float = 60) -> None:
    right, found = ids_of(llm.generate(PROMPTS, EIGHT)), []
    where, _, name = inside.rpartition(".")
    owner = operator.attrgetter(where)(engine)
    real = getattr(owner, name)

    def collecting(*given: Any) -> Any:
        gc.collect()
        return real(*given)

    def main() -> None:
        cycle = SimpleNamespace(stream=llm.stream(PROMPTS, LONG))
        cycle.itself = cycle
        next(cycle.stream)
        del cycle
        monkeypatch.setattr(owner, name, collecting)
        found.extend(ids_of(llm.generate(PROMPTS, EIGHT)))

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    thread.join(patience_s)
    is_stuck = thread.is_alive()
    if is_stuck:
        loop_of(llm)._gate.release()
        thread.join()
    assert not is_stuck
    assert found == right
    check_empty(llm)


def test_two_streams_and_a_batch_at_once(make_llm: MakeLLM) -> None:
    """Each takes its own outputs, whoever runs the steps."""
    alone = ids_of(make_llm().generate(PROMPTS, EIGHT))
    llm = make_llm()
    first, second = llm.stream(PROMPTS[0], EIGHT), llm.stream(PROMPTS[1], EIGHT)
    got: list[list[int]] = [[], []]
    for _ in range(3):
        for tokens, stream in zip(got, (first, second)):
            tokens.extend(next(stream)[1].outputs[0].token_ids)
    batch = llm.generate(PROMPTS[2:], EIGHT)
    for tokens, stream in zip(got, (first, second)):
        tokens.extend(token for _, output in stream for token in output.outputs[0].token_ids)
    assert [*got, *ids_of(batch)] == alone
    check_empty(llm)


def test_requests_may_be_added_between_steps(make_llm: MakeLLM) -> None:
    alone = ids_of(make_llm().generate(PROMPTS, EIGHT))
    llm = make_llm()
    ids, outputs = [], {}
    for prompt in PROMPTS:
        ids.append(llm.add_request(prompt, EIGHT))
        for _ in range(2):
            outputs.update({output.request_id: output for output in llm.step()})
    while llm.has_unfinished_requests():
        outputs.update({output.request_id: output for output in llm.step()})
    assert ids_of([outputs[request_id] for request_id in ids]) == alone
    assert llm.step() == []
    check_empty(llm)


def test_chat_is_generate_with_the_template(make_llm: MakeLLM) -> None:
    llm = make_llm()
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    rendered = "<|start|>system: be kind\n<|start|>user: hello\n<|start|>assistant:"
    chat = llm.chat(messages, EIGHT)[0]
    assert chat.prompt == rendered
    assert ids_of([chat]) == ids_of(llm.generate(rendered, EIGHT))
    both = llm.chat([messages, messages[1:]], EIGHT)
    assert [output.prompt for output in both] == [rendered, rendered.replace("<|start|>system: be kind\n", "")]
    streamed = [token for _, output in llm.stream_chat(messages, EIGHT) for token in output.outputs[0].token_ids]
    assert streamed == ids_of([chat])[0]
    assert llm.chat(messages, EIGHT, add_generation_prompt=False)[0].prompt == rendered.removesuffix("<|start|>assistant:")


def test_an_abort_ends_one_request_wherever_it_is(make_llm: MakeLLM) -> None:
    alone = ids_of(make_llm().generate(PROMPTS, EIGHT))
    llm = make_llm(max_num_seqs=2)
    running, waiting, other = (llm.add_request(prompt, EIGHT) for prompt in PROMPTS[:3])
    llm.step()
    llm.step()
    assert llm.abort(waiting)
    assert llm.abort(running)
    assert not llm.abort(running), "it has ended"
    assert not llm.abort("77")
    assert not llm.abort("no number")
    found = {}
    while llm.has_unfinished_requests():
        found.update({output.request_id: output for output in llm.step()})
    assert {request_id: output.outputs[0].finish_reason for request_id, output in found.items()} == {
        running: "abort",
        waiting: "abort",
        other: "length",
    }
    assert ids_of([found[running]])[0] == alone[0][: len(found[running].outputs[0].token_ids)]
    assert len(found[running].outputs[0].token_ids) > 0
    assert ids_of([found[other]]) == [alone[2]]
    check_empty(llm)


def test_an_abort_while_the_step_is_in_flight_drops_its_token(llm: LLM) -> None:
    first = llm.add_request(PROMPTS[0], EIGHT)
    second = llm.add_request(PROMPTS[1], EIGHT)
    llm.step()

    def abort(plan: Any, logits: Any) -> None:
        assert llm.abort(first)

    with faulty_model(llm, changing(abort), {0}):
        ended = llm.step()
    assert [(output.request_id, output.outputs[0].finish_reason) for output in ended] == [(first, "abort")]
    assert len(ended[0].outputs[0].token_ids) == 1, "the token of the step in flight counts no more"
    while llm.has_unfinished_requests():
        ended += llm.step()
    assert ended[-1].request_id == second
    assert len(ended[-1].outputs[0].token_ids) == 8
    check_empty(llm)


def test_an_abort_from_another_thread_ends_a_running_batch(llm: LLM) -> None:
    seen = threading.Event()

    def tell(plan: Any, logits: Any) -> None:
        seen.set()

    def abort() -> None:
        seen.wait(10)
        for number in range(1, len(PROMPTS) + 1):
            llm.abort(str(number))

    thread = threading.Thread(target=abort)
    thread.start()
    with faulty_model(llm, changing(tell)):
        outputs = llm.generate(PROMPTS, LONG)
    thread.join()
    assert {output.outputs[0].finish_reason for output in outputs} == {"abort"}
    check_empty(llm)


def test_threads_that_generate_at_once_get_their_own_answers(make_llm: MakeLLM) -> None:
    alone = ids_of(make_llm().generate(PROMPTS, EIGHT))
    llm = make_llm()
    found: dict[int, list[list[int]]] = {}

    def run(place: int) -> None:
        found[place] = ids_of(llm.generate(PROMPTS[place], EIGHT))

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place][0] for place in range(len(PROMPTS))] == alone
    check_empty(llm)


def test_what_a_request_took_is_told(make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.generate(PROMPTS[5], EIGHT)
    output = llm.generate(PROMPTS[5], EIGHT)[0]
    metrics = output.metrics
    assert metrics is not None
    assert output.num_cached_tokens == 63, "64 tokens are 8 blocks; of the last one all rows but the last are copied"
    assert metrics.first_token_ts is not None
    assert metrics.last_token_ts is not None
    assert metrics.arrival_time < metrics.first_token_ts < metrics.last_token_ts
    assert metrics.num_generation_tokens == 8
    assert metrics.ttft_s == metrics.first_token_ts - metrics.arrival_time
    assert metrics.tokens_per_s is not None
    assert metrics.tokens_per_s > 0


def test_the_report_counts_what_happened(make_llm: MakeLLM) -> None:
    llm = make_llm(num_blocks=12)
    outputs = llm.generate(PROMPTS[:4] * 2, EIGHT)
    report, stats = llm.kv_report(), llm.scheduler.stats()
    metrics = [output.metrics for output in outputs if output.metrics is not None]
    assert report.preemptions == sum(one.num_preemptions for one in metrics) > 0
    assert report.num_blocks == 12
    assert 0 < report.peak_blocks <= 11
    assert report.used_blocks == 0
    assert report.steps == stats["steps"] > 0
    assert report.wasted_rows_percent == pytest.approx(100 * stats["wasted_rows_sum"] / stats["taken_rows_sum"])
    assert 0 < report.wasted_rows_percent < 100
    assert report.prefix_hit_percent == pytest.approx(100 * stats["prefix_hits"] / stats["prefix_queries"])
    assert 0 < report.plan_us_p50 <= report.plan_us_p99
    assert 0 < report.commit_us_p50 <= report.commit_us_p99
    assert report.as_dict()["preemptions"] == report.preemptions
    assert f"preemptions      {report.preemptions}" in str(report).splitlines()


def test_two_engines_do_not_touch_each_other(make_llm: MakeLLM, tiny_model: Any) -> None:
    """Over one model, interleaved step by step: other blocks, other budget, other seeds; one fails, one is closed."""
    alone = ids_of(make_llm().generate(PROMPTS, EIGHT))
    first, second = make_llm(block_size=4, num_blocks=100), make_llm(block_size=16, max_num_batched_tokens=8)
    a = [first.add_request(prompt, EIGHT) for prompt in PROMPTS]
    b = [second.add_request(prompt, EIGHT) for prompt in reversed(PROMPTS)]
    found_a: dict[str, RequestOutput] = {}
    found_b: dict[str, RequestOutput] = {}
    while first.has_unfinished_requests() or second.has_unfinished_requests():
        found_a.update({output.request_id: output for output in first.step()})
        found_b.update({output.request_id: output for output in second.step()})
    assert ids_of([found_a[one] for one in a]) == alone
    assert ids_of([found_b[one] for one in reversed(b)]) == alone
    check_empty(first)
    check_empty(second)
    second.add_request(PROMPTS[0], EIGHT)
    second.shutdown()
    assert ids_of(first.generate(PROMPTS, EIGHT)) == alone
    check_empty(first)


def test_a_borrowed_model_is_given_back_when_its_last_engine_closes(make_llm: MakeLLM, tiny_model: Any) -> None:
    assert tiny_model.config._attn_implementation == "sdpa"
    first, second = make_llm(), make_llm()
    assert tiny_model.config._attn_implementation != "sdpa"
    first.shutdown()
    assert tiny_model.config._attn_implementation != "sdpa"
    assert len(second.generate(PROMPTS, EIGHT)) == len(PROMPTS)
    with second:
        pass
    assert tiny_model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 7}, {"num_blocks": 12}, {"block_size": 1, "num_blocks": 400}]
)
def test_seeded_text_depends_on_nothing_but_its_seed(options: dict[str, Any], make_llm: MakeLLM) -> None:
    params = [
        SamplingParams(temperature=1.0, top_p=0.9, seed=place, max_tokens=12, ignore_eos=True) for place in range(len(IDS))
    ]
    alone = [ids_of(make_llm().generate(prompt, one))[0] for prompt, one in zip(PROMPTS, params)]
    llm = make_llm(**options) if "num_blocks" not in options or options["num_blocks"] > 12 else make_llm(num_blocks=12)
    prompts = PROMPTS if llm.config.num_blocks != 12 else PROMPTS[:5]
    assert ids_of(llm.generate(prompts, params[: len(prompts)])) == alone[: len(prompts)]
    assert llm.config.num_blocks != 12 or llm.kv_report().preemptions > 0


def test_the_engine_seed_repeats_unseeded_text(make_llm: MakeLLM) -> None:
    once, again, other = (ids_of(make_llm(seed=seed).generate(PROMPTS, DRAWN)) for seed in (5, 5, 6))
    assert once == again
    assert once != other


def test_outputs_lost_at_a_preemption_are_caught(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail: rows that forget what was made before a preemption."""
    from blocktable.engine.output_rows import NO_OUTPUTS, OutputRows

    expected = ids_of(make_llm().generate(PROMPTS[:4] * 2, EIGHT))
    real = OutputRows.open
    monkeypatch.setattr(OutputRows, "open", lambda self, row, saved: real(self, row, NO_OUTPUTS))
    llm = make_llm(num_blocks=12)
    assert ids_of(llm.generate(PROMPTS[:4] * 2, EIGHT)) != expected
    assert llm.kv_report().preemptions > 0


def test_the_public_names_are_there() -> None:
    assert set(blocktable.__all__) <= set(dir(blocktable))
    for name in blocktable.__all__:
        assert getattr(blocktable, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        blocktable.LMM  # noqa: B018


@pytest.mark.parametrize(("parts_at", "copied"), [(41, 0), (42, 2), (45, 5), (47, 7)])
def test_a_prompt_that_parts_inside_a_block_copies_its_rows(make_llm: MakeLLM, parts_at: int, copied: int) -> None:
    """Promise: cached tokens are the full blocks and the rows copied behind them, and the text is that of a cold engine."""
    check_parting_prompt(make_llm, parts_at, copied)


@pytest.mark.mutant
def test_rows_that_are_not_copied_show_in_the_text(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVMemory, "copy_rows", lambda self, copies: None)
    with pytest.raises(AssertionError, match="not the cold engine's text"):
        check_parting_prompt(make_llm, 47, 7)


def check_parting_prompt(make_llm: MakeLLM, parts_at: int, copied: int) -> None:
    first, second = list(range(1, 61)), [*range(1, parts_at + 1), *range(100, 120)]
    cold = make_llm(enable_prefix_caching=False).generate({"prompt_token_ids": second}, EIGHT)[0]
    for enabled, expected in ((True, 40 + copied), (False, 40)):
        llm = make_llm(enable_partial_hits=enabled)
        llm.generate({"prompt_token_ids": first}, EIGHT)
        warm = llm.generate({"prompt_token_ids": second}, EIGHT)[0]
        assert warm.num_cached_tokens == expected
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids, "not the cold engine's text"
        check_empty(llm)

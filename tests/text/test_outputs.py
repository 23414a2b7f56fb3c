"""The record that a request gives back: times count from its arrival, and nothing is there before it has come."""

from blocktable.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput


def test_times_count_from_arrival_and_tokens_from_what_came() -> None:
    metrics = RequestMetrics(arrival_time=100.0)
    assert metrics.ttft_s is None
    assert metrics.tokens_per_s is None
    metrics.add_tokens(0, now=101.0)  # a prefill chunk brings none
    assert metrics.ttft_s is None
    metrics.add_tokens(1, now=102.0)
    metrics.add_tokens(3, now=104.0)
    assert metrics.ttft_s == 2.0
    assert metrics.tokens_per_s == 1.0
    assert metrics.num_generation_tokens == 4


def test_a_clock_that_has_not_moved_gives_no_rate() -> None:
    metrics = RequestMetrics(arrival_time=5.0)
    metrics.add_tokens(2, now=5.0)
    assert metrics.ttft_s == 0.0
    assert metrics.tokens_per_s is None


def test_the_shape_is_that_of_vllm() -> None:
    answer = CompletionOutput(index=0, text="x", token_ids=[1])
    assert not answer.finished()
    answer.finish_reason = "length"
    assert answer.finished()
    output = RequestOutput("7", "p", [1, 2], [answer], finished=True, num_cached_tokens=0)
    assert (output.request_id, output.prompt, output.prompt_token_ids, output.outputs[0].text) == ("7", "p", [1, 2], "x")
    assert output.metrics is None
    assert output.outputs[0].stop_reason is None

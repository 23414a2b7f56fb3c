"""The engine on the Triton kernels, in Triton's interpreter: its greedy text is transformers' own, with shared prefixes and
captured steps too."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("tests.kernels.interpreter").mend()

from blocktable import LLM, SamplingParams  # noqa: E402 - after the interpreter is chosen
from blocktable.engine import build  # noqa: E402
from blocktable.kernels import triton_cascade, triton_decode  # noqa: E402
from blocktable.model import attention_backend, decode_graphs, gpu_attention  # noqa: E402
from blocktable.model.attention_backend import CascadeRule  # noqa: E402
from blocktable.model.decode_graphs import Run  # noqa: E402
from blocktable.model.parcel import Parcel  # noqa: E402
from blocktable.model.runner import ModelRunner  # noqa: E402
from tests.engine.reference import generate_reference  # noqa: E402
from tests.engine.tiny_llama import make_model, make_tokenizer  # noqa: E402
from tests.model import tiny  # noqa: E402
from tests.model.handmade_plan import Pages  # noqa: E402
from tests.model.served import distance, own_logits, serve, texts_of  # noqa: E402

# numpy's, of rows that are masked afterwards
pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("one_torch_thread", "triton_on_a_cpu"),
]

NAN = float("nan")

SHARED = list(range(40, 73))
PROMPTS = [[*SHARED, 5, 6, 7], [*SHARED, 9], [*range(11, 18)]]
OUTPUTS = 5
SHARED_BYTES = 32 * 2 * 16 * 2 * 4
"""What the second one need not read of the first one's 32 positions: two KV heads of 16, K and V, float32."""


class FakeGraphs:
    """Graphs of a device that there is not: what was captured runs again, over the same tensors."""

    def __init__(self) -> None:
        self.captured = 0
        self.replayed = 0
        self.refuses = False

    def capture(self, run: Run) -> Run:
        """Runs once, as a capture does first."""
        if self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        run()
        self.captured += 1

        def replay() -> Tensor:
            self.replayed += 1
            return run()

        return replay


@pytest.fixture
def triton_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is taken for a GPU."""
    own = attention_backend._objection
    monkeypatch.setattr(attention_backend, "_objection", lambda name, *rest: None if name == "triton" else own(name, *rest))


def generate(graphs: FakeGraphs | None = None, **options: Any) -> list[list[int]]:
    """Greedy text of a tiny model by the Triton kernels, with these graphs."""
    options = {"num_blocks": 64, "block_size": 8, "max_num_seqs": 4, "self_check": False} | options
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "graphs_of", lambda device: graphs)
        llm = LLM(make_model(), tokenizer=make_tokenizer(), attention_backend="triton", **options)
    try:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=OUTPUTS))
    finally:
        llm.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def cascades(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The members of every cascade, while bounds are such that a tiny model's prefixes pay."""
    met: list[tuple[int, ...]] = []
    own = triton_cascade.cascade_decode

    def counted(q: Any, k_cache: Any, v_cache: Any, batch: Any, **options: Any) -> Tensor:
        met.append(batch.prefixes.members)
        return own(q, k_cache, v_cache, batch, **options)

    monkeypatch.setattr(triton_cascade, "cascade_decode", counted)
    rule = CascadeRule(positions=16, bytes=SHARED_BYTES, bytes_instead_of_graph=SHARED_BYTES + 1)
    monkeypatch.setattr(gpu_attention, "CASCADE", rule)
    return met


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """transformers' own text."""
    return generate_reference(make_model(), PROMPTS, OUTPUTS)


def test_text_is_that_of_transformers_with_prefixes_attended_once(
    expected: list[list[int]], cascades: list[tuple[int, ...]]
) -> None:
    assert generate(self_check=True) == expected
    assert (0, 1) in cascades, "the two that share a prefix were attended together"
    assert all(members == (0, 1) for members in cascades)


def test_a_cascade_that_does_not_pay_is_not_run(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[int]], cascades: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(gpu_attention, "CASCADE", gpu_attention.CASCADE._replace(bytes=SHARED_BYTES + 1))
    assert generate() == expected
    assert cascades == []


def test_the_bounds_are_those_of_a_part_and_of_launches() -> None:
    assert gpu_attention.CASCADE == (triton_decode.PART, 32 << 20, 256 << 20)


def test_text_is_the_same_with_captured_steps(expected: list[list[int]], cascades: list[tuple[int, ...]]) -> None:
    """Three run, as four, in one graph; a graph goes before a cascade that saves less than its launches."""
    graphs = FakeGraphs()
    assert generate(graphs) == expected
    assert graphs.captured == 1
    assert graphs.replayed == OUTPUTS - 1
    assert cascades == []


def test_a_cascade_goes_before_a_graph_where_it_saves_more(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[int]], cascades: list[tuple[int, ...]]
) -> None:
    monkeypatch.setattr(gpu_attention, "CASCADE", gpu_attention.CASCADE._replace(bytes_instead_of_graph=SHARED_BYTES))
    graphs = FakeGraphs()
    assert generate(graphs) == expected
    assert cascades
    assert graphs.captured == 0


def test_an_engine_that_is_told_to_captures_nothing(expected: list[list[int]]) -> None:
    graphs = FakeGraphs()
    assert generate(graphs, cuda_graphs=False) == expected
    assert graphs.captured == 0
    assert decode_graphs.graphs_of(torch.device("cpu")) is None
    assert isinstance(decode_graphs.graphs_of(torch.device("cuda")), decode_graphs.CudaGraphs)


def test_what_cannot_be_captured_runs_as_before(expected: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    graphs = FakeGraphs()
    graphs.refuses = True
    assert generate(graphs) == expected
    assert graphs.captured == 0
    assert caplog.text.count("this model's forward cannot be captured: operation not permitted") == 1


TEXTS = texts_of(tiny.VOCAB_SIZE, lengths=(21, 13, 9))


def shallow() -> Any:
    """Two layers: the interpreter takes half a second for a launch."""
    return tiny.build("llama", num_hidden_layers=2)


def play_padded() -> None:
    """Steps of three, then two, in graphs of four and two, over a pool full of poison: the model's own logits, and nothing is
    written but the batch's slots."""
    graphs, reference = FakeGraphs(), own_logits(shallow(), TEXTS)
    pages = Pages(TEXTS, block_size=4)
    served = serve(shallow(), pages)
    runner = ModelRunner(served.loaded, served.memory, "triton", graphs)
    buffer = served.memory.buffer
    buffer.fill_(NAN)
    runner.forward(pages.plan([18, 10, 7], []))
    for counts in ([1, 1, 1], [1, 1, 0], [1, 0, 1]):
        plan = pages.plan(counts)
        own = np.unique(plan.slot_mapping[0] // 4)
        before = buffer.clone()
        rows = [index for index, count in enumerate(counts) if count]
        logits = runner.forward(plan)
        assert distance([logits], [torch.stack([reference[index][pages.done[index] - 1] for index in rows])]) < 1e-4
        others = [block for block in range(len(buffer)) if block not in own]
        assert torch.equal(buffer[others].view(torch.uint8), before[others].view(torch.uint8)), "another block was written"
    assert (graphs.captured, graphs.replayed) == (2, 3)


def test_rows_that_are_padding_write_nowhere_and_change_no_answer() -> None:
    play_padded()


def test_padding_that_points_at_a_slot_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_graphs, "NOWHERE", 0)
    with pytest.raises(AssertionError, match="another block was written"):
        play_padded()


ARRAYS = ("token_ids", "positions", "slots", "lens", "seq_slots", "places", "blocks")


def forget(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step sends of one array stays what the first one sent."""
    send, number = Parcel.send, ARRAYS.index(name)

    def forgetful(self: Any) -> list[Tensor]:
        if len(self.device) != len(ARRAYS):  # of a step without a graph
            return send(self)
        kept = self.device[number].clone()
        send(self)
        if "kept" in self.__dict__:
            self.device[number].copy_(kept)
        self.kept = kept
        return self.device

    monkeypatch.setattr(Parcel, "send", forgetful)


@pytest.mark.parametrize("name", ARRAYS[:5])
def test_an_array_that_keeps_what_the_last_step_put_there_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forget(name, monkeypatch)
    with pytest.raises(AssertionError):
        play_padded()


def test_blocks_that_sequences_take_while_they_run_in_graphs_are_in_the_tables(
    monkeypatch: pytest.MonkeyPatch, expected: list[list[int]]
) -> None:
    """The control of the texts above: contexts go over the edge of a block; a change that is not brought is told."""
    forget("blocks", monkeypatch)
    assert generate(FakeGraphs()) != expected

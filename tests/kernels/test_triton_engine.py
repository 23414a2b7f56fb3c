"""The engine on the Triton kernels, in Triton's interpreter: its greedy text is transformers' own, shared prefixes included."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("tests.kernels.interpreter").mend()

from blocktable import LLM, SamplingParams  # noqa: E402 - after the interpreter is chosen
from blocktable.kernels import triton_cascade, triton_decode  # noqa: E402
from blocktable.model import attention_backend, gpu_attention  # noqa: E402
from tests.engine.reference import generate_reference  # noqa: E402
from tests.engine.tiny_llama import make_model, make_tokenizer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows that are masked afterwards

SHARED = list(range(40, 73))
PROMPTS = [[*SHARED, 5, 6, 7], [*SHARED, 9], [11, 12, 13, 14]]
OUTPUTS = 5


def generate(monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[list[int]]:
    """Greedy text of a tiny model whose CPU is taken for a GPU."""
    own = attention_backend._objection
    monkeypatch.setattr(attention_backend, "_objection", lambda name, *rest: None if name == "triton" else own(name, *rest))
    llm = LLM(
        make_model(),
        tokenizer=make_tokenizer(),
        num_blocks=64,
        block_size=8,
        max_num_seqs=4,
        attention_backend="triton",
        **options,
    )
    try:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS], SamplingParams(temperature=0, max_tokens=OUTPUTS)
        )
    finally:
        llm.shutdown()
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def cascades(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The members of every cascade, while bounds are such that a tiny model's prefixes pay."""
    met: list[tuple[int, ...]] = []
    own = triton_cascade.cascade_decode

    def counted(q: Any, k_cache: Any, v_cache: Any, batch: Any, **options: Any) -> torch.Tensor:
        met.append(batch.prefixes.members)
        return own(q, k_cache, v_cache, batch, **options)

    monkeypatch.setattr(triton_cascade, "cascade_decode", counted)
    monkeypatch.setattr(gpu_attention, "SHARED_POSITIONS", 16)
    monkeypatch.setattr(gpu_attention, "CASCADE_BYTES", 1)
    return met


@pytest.mark.usefixtures("one_torch_thread")
def test_text_is_that_of_transformers_with_prefixes_attended_once(
    monkeypatch: pytest.MonkeyPatch, cascades: list[tuple[int, ...]]
) -> None:
    expected = generate_reference(make_model(), PROMPTS, OUTPUTS)
    assert generate(monkeypatch, self_check=True) == expected
    assert (0, 1) in cascades, "the two that share a prefix were attended together"
    assert all(members == (0, 1) for members in cascades)


@pytest.mark.usefixtures("one_torch_thread")
def test_a_cascade_that_does_not_pay_is_not_run(monkeypatch: pytest.MonkeyPatch, cascades: list[tuple[int, ...]]) -> None:
    expected = generate_reference(make_model(), PROMPTS, OUTPUTS)
    positions = 2 * 16 * 2 * 4  # two KV heads of 16, K and V, float32
    monkeypatch.setattr(gpu_attention, "CASCADE_BYTES", 32 * positions + 1)
    assert generate(monkeypatch, self_check=False) == expected
    assert cascades == []
    monkeypatch.setattr(gpu_attention, "CASCADE_BYTES", 32 * positions)
    assert generate(monkeypatch, self_check=False) == expected
    assert cascades


def test_the_bounds_are_those_of_a_part_and_of_a_launch() -> None:
    assert gpu_attention.SHARED_POSITIONS == triton_decode.PART
    assert gpu_attention.CASCADE_BYTES == 32 << 20

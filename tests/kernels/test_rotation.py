"""Rotation and store in one launch inside of a model: its logits are the model's own, and other models stay as they are."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("tests.kernels.interpreter").mend()

from transformers import PreTrainedModel  # noqa: E402 - after the interpreter is chosen

from blocktable.kernels import rope, triton_rope, triton_store  # noqa: E402
from blocktable.model import attachment, attention_backend  # noqa: E402
from blocktable.model.linear_backend import use_torch_linears  # noqa: E402
from blocktable.model.loader import unwrap_model, wrap_model  # noqa: E402
from blocktable.model.rotating_attention import RotatingForward, rotate_in_store  # noqa: E402
from blocktable.model.runner import ModelRunner  # noqa: E402
from tests.model import tiny  # noqa: E402
from tests.model.handmade_plan import Pages  # noqa: E402
from tests.model.served import distance, own_logits, serve, texts_of  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), pytest.mark.usefixtures("one_torch_thread")]

ROTATED = rope.rotated
TEXTS = texts_of(tiny.VOCAB_SIZE, lengths=(9, 6))


def changed(name: str) -> tuple[PreTrainedModel, int]:
    """A wrapped model, and how many of its attention modules were changed."""
    model = tiny.build(name)
    wrap_model(model, linear_backend="torch", self_check=False)
    return model, rotate_in_store(model, model.__dict__[attachment._ATTACHMENT].trace)


def num_rotating(model: PreTrainedModel) -> int:
    return sum(isinstance(module, RotatingForward) for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral"])
def test_all_layers_of_llamas_relatives_are_changed(name: str) -> None:
    model, count = changed(name)
    assert count == num_rotating(model) == 4
    other = copy.deepcopy(model)
    assert num_rotating(other) == 4
    unwrap_model(model)
    assert num_rotating(model) == 0


@pytest.mark.parametrize("name", ["gpt2", "qwen3", "gemma3_text", "cohere", "gpt_neox"])
def test_models_with_other_rotations_norms_or_modules_stay_as_they_are(name: str) -> None:
    if name not in tiny.PARTICULAR:
        pytest.skip(f"there is no tiny {name}")
    model, count = changed(name)
    assert count == num_rotating(model) == 0


def play(monkeypatch: pytest.MonkeyPatch) -> float:
    """A prompt in chunks and single queries: the distance to the model's own logits. Nothing is stored in another way."""
    own = attention_backend._objection
    monkeypatch.setattr(attention_backend, "_objection", lambda name, *rest: None if name == "triton" else own(name, *rest))
    rotations, stores = [], []
    turn, store = attention_backend._triton().rope_store_kv, triton_store.store_kv
    backend = attention_backend._triton()
    noted = lambda *given: rotations.append(len(given[0])) or turn(*given)  # noqa: E731
    monkeypatch.setattr(attention_backend, "_triton", lambda: replace(backend, rope_store_kv=noted))
    monkeypatch.setattr(triton_store, "store_kv", lambda *given: stores.append(given) or store(*given))
    model = tiny.build("llama", num_hidden_layers=2)
    reference = own_logits(model, TEXTS)
    pages = Pages(TEXTS)
    served = serve(model, pages)
    use_torch_linears(model)  # those of the core have layers of their own
    rotate_in_store(model, model.__dict__[attachment._ATTACHMENT].trace)
    runner = ModelRunner(served.loaded, served.memory, "triton")
    found: list[list[Any]] = [[], []]
    for counts in ([5, 1], [2, 4], [1, 1], [1, 0]):
        parts = runner.forward(pages.plan(counts)).split([count for count in counts if count])
        for index, part in zip((index for index, count in enumerate(counts) if count), parts):
            found[index].append(part)
    assert stores == []
    assert rotations == [count for count in (6, 6, 2, 1) for _ in range(2)]
    return distance([torch.cat(parts) for parts in found], reference)


def test_logits_are_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert play(monkeypatch) < 1e-4


def test_keys_that_are_stored_without_a_rotation_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    own = triton_rope.rope_store_kv

    def forgetful(q: Any, k: Any, v: Any, cos: Any, sin: Any, *rest: Any) -> Any:
        own(q, k, v, torch.ones_like(cos), torch.zeros_like(sin), *rest)
        return own(q, k, v, cos, sin, *rest[:2], torch.full_like(rest[2], -1))

    monkeypatch.setattr(triton_rope, "rope_store_kv", forgetful)
    monkeypatch.setattr("blocktable.model.gpu_attention.rope_store_kv", forgetful)
    assert play(monkeypatch) > 1e-2


@pytest.mark.parametrize(
    "fault",
    [
        lambda rows, cos, sin: ROTATED(rows, cos, -sin),
        lambda rows, cos, sin: ROTATED(rows, sin, cos),
        lambda rows, cos, sin: rows,
    ],
    ids=["backwards", "the other angles", "not at all"],
)
def test_a_rotation_that_is_not_the_models_changes_no_module(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rope, "rotated", fault)
    assert changed("llama")[1] == 0


def test_a_scale_that_depends_on_positions_changes_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """As some relatives of Llama have it, for positions that are far away only."""
    from transformers.models.llama.modeling_llama import LlamaAttention

    own = LlamaAttention.forward

    def scaled(self: Any, hidden_states: Any, *args: Any, **options: Any) -> Any:
        positions = options.get("position_ids")
        if positions is not None and int(positions.max()) > 10**5:
            hidden_states = hidden_states * 1.5
        return own(self, hidden_states, *args, **options)

    monkeypatch.setattr(LlamaAttention, "forward", scaled)
    assert changed("llama")[1] == 0

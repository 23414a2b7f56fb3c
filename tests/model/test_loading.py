"""Loading: what the text `model` means, and the error for each way in which it can fail."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3NextConfig, T5Config
from transformers.utils import logging as transformers_logging

from blocktable.errors import BlocktableError, InvalidInputError, ModelLoadError, UnsupportedModelError
from blocktable.model import loader
from blocktable.model.loader import load_model, unwrap_model, wrap_model
from blocktable.model.source import SourceKind, resolve_source
from tests.model import tiny
from tests.model.served import distance, own_logits, texts_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a tiny llama and a tokenizer of 128 words."""
    folder = tmp_path_factory.mktemp("llama")
    tiny.build("llama").save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<end of turn>": 3, **{f"w{i}": i for i in range(4, 128)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end of turn>").save_pretrained(folder)
    return folder


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved` to break."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def load(path: Path | str, **options: object) -> object:
    return load_model(str(path), device="cpu", **options)


def test_a_directory_is_loaded_with_all_that_the_engine_must_know(saved: Path) -> None:
    stages: list[str] = []
    loaded = load_model(str(saved), device="cpu", progress=stages.append)
    assert (loaded.vocab_size, loaded.max_model_len, loaded.dtype) == (128, 512, torch.float32)
    assert loaded.device == torch.device("cpu")
    assert not loaded.model.training
    assert loaded.tokenizer is not None
    assert loaded.tokenizer.encode("w4 w9") == [4, 9]
    assert loaded.name == str(saved)
    for stage in ("configuration", "weights", "tokenizer", "attention", "comparing"):
        assert any(stage in line for line in stages), f"{stage} is not among {stages}"


def test_end_tokens_are_those_of_all_three_places(saved: Path, directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9, 9999]}))
    loaded = load_model(str(directory), device="cpu")
    # 2: config.json; 3: the tokenizer; 5 and 9: generation_config.json; 9999 is outside of the vocabulary.
    assert loaded.eos_token_ids == (2, 3, 5, 9)


def test_loading_changes_no_number(saved: Path) -> None:
    texts = texts_of(tiny.VOCAB_SIZE)
    loaded = load_model(str(saved), device="cpu")
    unwrap_model(loaded.model)
    assert distance(own_logits(loaded.model, texts), own_logits(tiny.build("llama"), texts)) < 1e-6


def test_a_directory_without_a_tokenizer_gives_none_and_another_place_can_be_named(saved: Path, directory: Path) -> None:
    for file in directory.glob("tokenizer*"):
        file.unlink()
    assert load_model(str(directory), device="cpu").tokenizer is None
    assert load_model(str(directory), tokenizer=str(saved), device="cpu").tokenizer is not None


def test_the_self_check_of_numbers_can_be_left_out(saved: Path) -> None:
    stages: list[str] = []
    load_model(str(saved), device="cpu", self_check=False, progress=stages.append)
    assert not any("comparing" in line for line in stages)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_and_keys_have_the_dtype_asked_for(saved: Path, dtype: str) -> None:
    loaded = load_model(str(saved), device="cpu", dtype=dtype)
    assert loaded.dtype == loaded.geometry.dtype == loaded.model.dtype == getattr(torch, dtype)


def test_a_model_saved_in_bfloat16_is_float32_on_a_cpu_unless_asked_otherwise(tmp_path: Path) -> None:
    tiny.build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_model(str(tmp_path), device="cpu").dtype == torch.float32


def test_what_the_text_means() -> None:
    assert resolve_source("org/name").kind is SourceKind.HUB
    assert resolve_source("gpt2").kind is SourceKind.HUB


def _without(*patterns: str) -> Callable[[Path], None]:
    def remove(directory: Path) -> None:
        for pattern in patterns:
            for file in directory.glob(pattern):
                file.unlink()

    return remove


def _with_config(text: str) -> Callable[[Path], None]:
    return lambda directory: (directory / "config.json").write_text(text) and None


def _changed_config(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        content = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**content, **changes}))

    return change


def _cut_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def _weights_without_a_layer(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "layers.1.mlp" not in name}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def _weights_of_noise(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"\x00" * 4096)


def _pickled_noise(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(b"not a checkpoint")


def _weights_of_nan(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"].fill_(float("nan"))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def _broken_tokenizer(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"model": 17}')


BROKEN: dict[str, tuple[Callable[[Path], None], type[BlocktableError], str]] = {
    "empty directory": (_without("*"), ModelLoadError, "the directory is empty"),
    "no config.json": (_without("config.json"), ModelLoadError, "holds no config.json"),
    "config.json is not JSON": (_with_config("{'a': 1}"), ModelLoadError, "config.json is broken: .*line 1"),
    "config.json is cut": (_with_config('{"model_type": "lla'), ModelLoadError, "config.json is broken"),
    "config.json is a list": (_with_config("[]"), ModelLoadError, "names no model_type"),
    "no model_type": (_with_config("{}"), ModelLoadError, "names no model_type"),
    "unknown architecture": (_changed_config(model_type="zork"), UnsupportedModelError, "does not know .*'zork'"),
    "code of its own": (
        _changed_config(model_type="zork", auto_map={"AutoConfig": "x.Y"}),
        UnsupportedModelError,
        "code that comes with a model is not run",
    ),
    "sizes that do not fit": (
        _changed_config(num_attention_heads="four"),
        ModelLoadError,
        "configuration could not be read.*num_attention_heads.*four",
    ),
    "no weights": (_without("*.safetensors"), ModelLoadError, "holds no weights"),
    "cut weights": (_cut_weights, ModelLoadError, "its weights could not be read"),
    "weights of noise": (_weights_of_noise, ModelLoadError, "its weights could not be read"),
    "pickled noise": (_pickled_noise, ModelLoadError, "the file is broken, or holds more than tensors"),
    "missing weights": (_weights_without_a_layer, ModelLoadError, r"has no weights for model\.layers\.1\.mlp"),
    "wrong shapes": (_changed_config(intermediate_size=80), ModelLoadError, "weights of wrong shapes for .*mlp"),
    "weights that are not numbers": (_weights_of_nan, UnsupportedModelError, "not finite"),
    "broken tokenizer": (_broken_tokenizer, ModelLoadError, "its tokenizer could not be read"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_directory_is_refused_with_its_reason(directory: Path, fault: str) -> None:
    break_it, error, reason = BROKEN[fault]
    break_it(directory)
    with pytest.raises(error, match=reason) as caught:
        load(directory)
    assert str(directory) in str(caught.value)
    # What a user sees is this error alone, not a library's traceback above it.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("name", ["/no/such/directory", "./missing", "a/b/c", "with space/x", "~no-such-user/x"])
def test_a_directory_that_is_not_there_is_told_so(name: str) -> None:
    with pytest.raises(ModelLoadError, match="no such directory"):
        load(name)


@pytest.mark.parametrize("name", ["no-such-org/no-such-model", "no-such-model"])
def test_a_hub_id_that_cannot_be_had_is_told_in_plain_words(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"no such directory here.*HF_HUB_OFFLINE") as caught:
        load(name)
    assert len(str(caught.value)) < 300
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "no such file"),
        (b"hello, world", "is no GGUF file"),
        (b"", "is no GGUF file"),
        (b"GGUF\x03", "could not be read"),
    ],
)
def test_a_gguf_file_that_is_none_is_refused(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=reason):
        load(path)


def test_a_cut_gguf_file_is_refused(smollm2_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2_gguf.open("rb") as file:
        path.write_bytes(file.read(3_000_000))
    with pytest.raises(ModelLoadError, match="could not be read"):
        load(path)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        load(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "config, reason", [(T5Config(), "encoder-decoder"), (Qwen3NextConfig(), "layers of type 'linear_attention'")]
)
def test_what_its_configuration_rules_out_is_refused_before_weights_are_read(
    tmp_path: Path, config: T5Config | Qwen3NextConfig, reason: str
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path)


@pytest.mark.parametrize(
    "option, value, bound",
    [
        ("dtype", "float8", "must be one of auto"),
        ("device", "tpu", "must be auto, cpu"),
        ("device", "meta", "must be auto, cpu"),
        ("device", "cuda:99", "CUDA devices here"),
        ("linear_backend", "abacus", "must be one of auto"),
    ],
)
def test_an_option_out_of_bounds_names_field_value_and_bound(saved: Path, option: str, value: str, bound: str) -> None:
    with pytest.raises(InvalidInputError, match=bound) as caught:
        load_model(str(saved), **{"device": "cpu", option: value})
    assert (caught.value.field, caught.value.value) == (option, value)


@pytest.mark.parametrize("model", ["", "  ", None, 7])
def test_a_model_that_is_no_text_is_refused(model: object) -> None:
    with pytest.raises(InvalidInputError, match="must be a directory"):
        load_model(model)


def test_only_a_transformers_model_can_be_wrapped() -> None:
    with pytest.raises(InvalidInputError, match="must be a model of transformers"):
        wrap_model(torch.nn.Linear(2, 2))


def _global_state() -> dict[str, object]:
    return {
        "dtype": torch.get_default_dtype(),
        "verbosity": transformers_logging.get_verbosity(),
        "bars": transformers_logging.is_progress_bar_enabled(),
        "random": torch.random.get_rng_state().tolist(),
        "threads": torch.get_num_threads(),
        "grad": torch.is_grad_enabled(),
    }


def check_state(directory: Path, fault: str | None) -> None:
    """A load, good or bad, leaves global state as it was."""
    before = _global_state()
    if fault is None:
        load(directory, dtype="bfloat16")
    else:
        BROKEN[fault][0](directory)
        with pytest.raises(BlocktableError):
            load(directory, dtype="bfloat16")
    assert _global_state() == before


@pytest.fixture(params=[True, False], ids=["bars", "no bars"])
def libraries_set_up(request: pytest.FixtureRequest) -> Iterator[None]:
    """transformers with settings that are not its own."""
    had_bars = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    (transformers_logging.enable_progress_bar if request.param else transformers_logging.disable_progress_bar)()
    transformers_logging.set_verbosity(25)
    yield
    transformers_logging.set_verbosity(verbosity)
    (transformers_logging.enable_progress_bar if had_bars else transformers_logging.disable_progress_bar)()


@pytest.mark.usefixtures("libraries_set_up")
@pytest.mark.parametrize("fault", [None, "cut weights", "missing weights", "no config.json"])
def test_a_load_leaves_global_state_as_it_was(directory: Path, fault: str | None) -> None:
    check_state(directory, fault)


@contextmanager
def _borrowed_and_kept() -> Iterator[None]:
    transformers_logging.set_verbosity_error()
    yield


@pytest.mark.usefixtures("libraries_set_up")
def test_global_state_that_is_not_given_back_would_be_noticed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "borrowed_libraries", _borrowed_and_kept)
    with pytest.raises(AssertionError):
        check_state(directory, None)

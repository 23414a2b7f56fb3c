"""Recorded workloads: each format is read as it was written, the virtual clock gives one schedule, nothing wrong is timed."""

import gzip
import json

import numpy as np
import pytest

from blocktable import Scheduler
from blocktable.bench import replay, traces
from blocktable.cli.command import main
from blocktable.errors import InvalidInputError

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
MOONCAKE = [
    {"timestamp": 3000, "input_length": 1030, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 0, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]},
]
TEXT = [{"timestamp": 1760000000000000, "input": "Hé", "output": "abc", "session_id": "s"}]


def written(path, text: str):
    path.write_text(text)
    return path


def lines(records: list[dict[str, object]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def test_lengths_and_times_of_an_azure_file(tmp_path):
    first, second = traces.read_trace(written(tmp_path / "a.csv", AZURE), 100)
    assert (len(first.prompt), first.output, first.at_us) == (374, 44, 0)
    assert (len(second.prompt), second.output, second.at_us) == (396, 109, 4_314_579)
    assert first.prompt.max() < 100


def test_equal_hash_ids_of_a_mooncake_file_are_equal_tokens_and_come_in_the_order_of_time(tmp_path):
    early, late = traces.read_trace(written(tmp_path / "m.jsonl", lines(MOONCAKE)), 1000)
    assert (len(early.prompt), early.output, early.at_us) == (600, 7, 0)
    assert (len(late.prompt), late.output, late.at_us) == (1030, 5, 3_000_000)
    assert (early.prompt[:512] == late.prompt[:512]).all()
    assert (early.prompt[512:] != late.prompt[512:600]).any()


def test_text_is_read_as_bytes_also_when_it_is_packed(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.write(lines(TEXT))
    (one,) = traces.read_trace(path, 1000)
    assert one.prompt.tolist() == list("Hé".encode())
    assert one.output == 3


def test_a_limit_takes_the_first_requests(tmp_path):
    assert len(traces.read_trace(written(tmp_path / "a.csv", AZURE), 100, limit=1)) == 1


@pytest.mark.parametrize("text", ["", "TIMESTAMP,x\nnever,1,2\n", '{"timestamp": 1}\n', '{"timestamp": "x", "hash_ids": []}\n'])
def test_a_file_of_no_known_format_is_refused(text, tmp_path):
    with pytest.raises(InvalidInputError, match="trace"):
        traces.read_trace(written(tmp_path / "bad.jsonl", text), 100)


def test_a_missing_file_is_refused_by_name(capsys, tmp_path):
    assert main(["bench", "replay", "--trace", str(tmp_path / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err


def replayed(capsys, *arguments: str) -> dict[str, object]:
    assert main(["bench", "replay", *arguments, "--json"]) == 0
    (row,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return row


def test_one_file_gives_one_schedule(capsys):
    once, again = replayed(capsys, "--smoke"), replayed(capsys, "--smoke")
    same = ("requests", "left_out", "steps", "hit_rate", "preemptions", "kv_waste", "running_mean")
    assert [once[key] for key in same] == [again[key] for key in same]
    assert once["preemptions"] > 0
    assert once["hit_rate"] > 0


@pytest.mark.parametrize(
    ("option", "value", "counts"),
    [
        ("--max-len", "450", (1, 1, 0)),
        ("--blocks", "25", (1, 1, 1)),
        ("--blocks", "30", (2, 0, 1)),
        ("--blocks", "40", (2, 0, 0)),
    ],
)
def test_what_cannot_fit_is_counted(option, value, counts, capsys, tmp_path):
    """374 + 44 and 396 + 109 tokens. In 24 blocks the second never fits, and the first one outgrows them."""
    path = written(tmp_path / "a.csv", AZURE)
    row = replayed(capsys, "--trace", str(path), option, value, "--max-num-seqs", "4")
    assert (row["requests"], row["left_out"], row["outgrown"]) == counts


def test_a_replay_that_loses_a_request_gives_no_figures(capsys, monkeypatch):
    class Forgetful:
        """Aborts its first request."""

        def __init__(self, **sizes: object) -> None:
            self.scheduler = Scheduler(**sizes)

        def __getattr__(self, name):
            return getattr(self.scheduler, name)

        def submit(self, prompt: np.ndarray, **rest: object) -> int:
            request = self.scheduler.submit(prompt, **rest)
            if request == 1:
                self.scheduler.abort(request)
            return request

    monkeypatch.setattr(replay, "Scheduler", Forgetful)
    assert main(["bench", "replay", "--smoke"]) == 1
    assert "requests finish" in capsys.readouterr().err

"""The benchmarks print the promised keys, and time nothing whose answer is wrong. No figure is tested: it is a machine's."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from blocktable import BlockHasher, BlockPool, Scheduler
from blocktable.bench import NAMES, clock, episode, load, prefix, row
from blocktable.bench import hash as hash_bench
from blocktable.cli.command import main

ROOT = Path(__file__).resolve().parents[2]
QUANTILES = ("p50", "p99", "p999", "p9999", "max")
KEYS = {
    "pool": ["batch", "blocks", "threads", "content", "impl", "ns_per_block", "init_ms", "first_pass_ms", "bytes_per_block"],
    "hash": ["algorithm", "default", "ns_per_block", "tokens_per_s"],
    "prefix": ["tokens", "cached", "blocks", "pool", "add_us", "add_array_us", "match_us", "fork_us"],
    "scheduler": [
        "running", "waiting", "case", "policy", "pool", "phase", "gap_ms",
        *(f"{what}_us_{label}" for what in ("plan", "commit", "step", "floor") for label in QUANTILES),
        "ns_per_seq", "finishes_per_step", "gc_objects_per_step", "allocs_per_step",
    ],
    "attention": ["backend", "dtype", "batch", "context", "heads", "us", "gb_per_s", "fraction_of_copy", "fraction_of_read"],
    "sampling": ["case", "rows", "vocab", "ms", "us_per_row"],
    "replay": [
        "trace", "requests_per_s", "hit_rate", "preemptions", "kv_waste",
        *(f"step_us_{label}" for label in ("p50", "p99", "p999", "max")),
        "gc_objects_per_step", "allocs_per_step",
    ],
    "generate": [
        "model", "dtype", "requests", "prompt", "output",
        "output_tokens_per_s", "total_tokens_per_s", "kv_waste", "ttft_ms", "tpot_ms", "linear_share",
    ],
    "serve": [
        "case", "clients", "output",
        *("server_us", "engine_us", "events_per_token", "requests_per_s", "tokens_per_s", "first_ms_p50"),
    ],
    "dashboard": ["blocks", "clients", "step_ms", "closed_step_ms", "open_step_ms", "ratio_step_ms", "engine_share"],
}  # fmt: skip


def bench(capsys, *arguments: str) -> list[dict[str, object]]:
    """Rows of `blocktable bench …`, which must succeed."""
    assert main(["bench", *arguments, "--json"]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_mixed_load_has_everything_in_it(capsys):
    """Hits, chunks, preemptions, and more requests than run at once; reported like a recorded one."""
    (row_,) = bench(capsys, "replay", "--mixed", "1500")
    assert row_["trace"] == "mixed"
    assert row_["hit_rate"] > 0.3
    assert row_["preemptions"] > 0
    assert row_["gc_objects_per_step"] < 0.01  # one or two when something is used for the first time
    for quantile in ("p50", "p99", "p999", "max"):
        assert row_[f"step_us_{quantile}"] > 0


def test_every_benchmark_has_its_keys_written_down():
    assert set(KEYS) == set(NAMES)


@pytest.mark.parametrize("name", ["pool", "hash", "prefix", "scheduler", "replay"])
def test_rows_have_the_promised_keys_in_their_order(name, capsys):
    rows = bench(capsys, name, "--smoke")
    assert rows
    for one in rows:
        assert one["bench"] == name
        assert [key for key in one if key in KEYS[name]] == KEYS[name]


def test_attention_has_the_promised_keys_and_a_row_for_each_backend(capsys):
    pytest.importorskip("torch", reason="attention needs the extra `engine`")
    rows = bench(capsys, "attention", "--smoke")
    assert [(one["heads"], one["backend"]) for one in rows] == [
        (heads, backend) for heads in ("9/3x64", "32/8x128") for backend in ("cpu", "reference", "sdpa")
    ]
    for one in rows:
        assert [key for key in one if key in KEYS["attention"]] == KEYS["attention"]
        assert one["us"] > 0


def test_sampling_has_the_promised_keys_and_a_row_for_each_case(capsys):
    pytest.importorskip("torch", reason="sampling needs the extra `engine`")
    from blocktable.bench import sampling

    rows = bench(capsys, "sampling", "--smoke")
    assert [one["case"] for one in rows] == list(sampling.CASES)
    for one in rows:
        assert [key for key in one if key in KEYS["sampling"]] == KEYS["sampling"]
        assert one["ms"] > 0


@pytest.mark.parametrize(
    "case, fault, what",
    [
        ("penalties", ("row_rules.RowRules", "apply", lambda self, logits: None), "its best one"),
        ("logprobs_5", ("logprobs", "_best", lambda raw, count: np.arange(count)), "in their order"),
        ("logprobs_0", ("logprobs.HostLogprobs", "_log_sum", lambda self, raw: 0.0), "those of the logits"),
    ],
)
def test_a_sampler_that_answers_wrongly_is_not_timed(capsys, monkeypatch, case, fault, what):
    pytest.importorskip("torch", reason="sampling needs the extra `engine`")
    import blocktable.sampling.logprobs
    import blocktable.sampling.row_rules

    place = blocktable.sampling
    for name in fault[0].split("."):
        place = getattr(place, name)
    monkeypatch.setattr(place, *fault[1:])
    assert what in refused(capsys, "sampling", "--smoke", "--case", case)


def test_an_attention_that_answers_wrongly_is_not_timed(capsys, monkeypatch):
    pytest.importorskip("torch", reason="attention needs the extra `engine`")
    from blocktable.bench import attention

    for name, peer in tuple(attention.PEERS.items()):
        if name == "varlen":  # on GPUs only
            continue

        def wrong(step, peer=peer):
            attend = peer(step)
            return lambda k_cache, v_cache: attend(k_cache, v_cache) + 1e-3

        monkeypatch.setitem(attention.PEERS, name, wrong)
        assert "differs from the reference by 1.0e-03" in refused(capsys, "attention", "--smoke", "--backend", name)


@pytest.mark.parametrize("context", ["40", "128", "300"])
def test_the_attention_of_peers_over_pages_and_side_by_side_is_right(capsys, context, monkeypatch):
    pytest.importorskip("torch", reason="attention needs the extra `engine`")
    from blocktable.bench import attention

    monkeypatch.setattr(attention, "ROTATED_BYTES", 0)
    given = ("--batch", "3", "--context", context, "--rounds", "1", "--heads", "9/3x64", "--backend", "flex", "dense")
    assert [one["backend"] for one in bench(capsys, "attention", *given)] == ["flex", "dense"]


@pytest.mark.parametrize(("context", "whole", "partial"), [(40, [], 0), (256, [0, 1], None), (300, [0, 1], 2)])
def test_the_mask_of_flex_attention_names_the_pages_of_each_sequence(context, whole, partial):
    """Compiled, it goes by these indices, which plain torch does not look at."""
    torch = pytest.importorskip("torch", reason="attention needs the extra `engine`")
    from blocktable.bench.torch_peers import FlexPages

    pages = FlexPages(3, context, torch.device("cpu"))
    for sequence, table in enumerate(pages.table.tolist()):
        counts = [int(number[sequence]) for number in (pages.mask.full_kv_num_blocks, pages.mask.kv_num_blocks)]
        assert counts == [len(whole), int(partial is not None)]
        assert pages.mask.full_kv_indices[sequence, 0, 0, : len(whole)].tolist() == [table[page] for page in whole]
        if partial is not None:
            assert int(pages.mask.kv_indices[sequence, 0, 0, 0]) == table[partial]


def test_one_algorithm_is_the_default(capsys):
    assert [one["default"] for one in bench(capsys, "hash", "--smoke")].count(True) == 1


def test_steady_steps_finish_nothing_and_turnover_one_request_each(capsys):
    for case, finishes in (("steady", 0), ("turnover", 1)):
        (one,) = bench(
            capsys, "scheduler", "--running", "16", "--case", case, "--waiting", "20", "--blocks", "4k", "--steps", "64"
        )
        assert one["finishes_per_step"] == finishes
        assert one["gc_objects_per_step"] == 0


def test_named_options_are_combined(capsys):
    rows = bench(capsys, "scheduler", "--running", "1", "3", "--phase", "spread", "aligned", "--blocks", "1k", "--steps", "8")
    assert [(one["running"], one["phase"]) for one in rows] == [(1, "spread"), (1, "aligned"), (3, "spread"), (3, "aligned")]


def test_the_time_of_each_step_can_be_kept(capsys, tmp_path):
    path = tmp_path / "samples.jsonl"
    options = ("--running", "2", "--phase", "spread", "aligned", "--blocks", "1k", "--steps", "70", "--samples", str(path))
    rows = bench(capsys, "scheduler", *options)
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one["phase"] for one in kept] == ["spread", "aligned"]
    for row_, one in zip(rows, kept):
        assert len(one["step_ns"]) == 70
        assert clock.quantiles_us("step", one["step_ns"])["step_us_p50"] == row_["step_us_p50"]


def test_long_rows_begin_anew_only_when_the_pool_is_used_up(capsys, monkeypatch):
    """2,000 blocks hold two sequences of 8,192 tokens: one beginning for 1,000 steps, where else there would be four."""
    begun = []
    begin = episode.Episode._begin

    def counted(self: episode.Episode) -> Scheduler:
        begun.append(self)
        return begin(self)

    monkeypatch.setattr(episode.Episode, "_begin", counted)
    for options, beginnings in (((), 1 + 4 + 1), (("--long",), 1 + 1 + 1)):  # to check, to time, to count
        begun.clear()
        (row_,) = bench(capsys, "scheduler", "--running", "2", "--blocks", "2k", "--steps", "1000", *options)
        assert row_["steps"] == 1000
        assert len(begun) == beginnings


FAKE_VLLM = """
class Plan:
    def __init__(self, tokens):
        self.num_scheduled_tokens = tokens
        self.total_num_scheduled_tokens = sum(tokens.values())

class Scheduler:
    def schedule(self, tokens):
        return Plan(tokens)

    def update_from_output(self, plan):
        sum(range(20_000))
"""
PEER_SCRIPT = """
import sys
from vllm.v1.core.sched.scheduler import Scheduler

scheduler = Scheduler()
for tokens in ({"a": 9, "b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": 1}, {"b": 1}, {}):
    scheduler.update_from_output(scheduler.schedule(tokens))
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_the_steps_of_a_peer_are_timed_from_outside(code, tmp_path):
    """Only those in which all that run get one token; also of a script that fails."""
    package = tmp_path / "vllm" / "v1" / "core" / "sched"
    package.mkdir(parents=True)
    (package / "scheduler.py").write_text(FAKE_VLLM)
    (tmp_path / "script.py").write_text(PEER_SCRIPT)
    target = tmp_path / "steps.jsonl"
    command = [sys.executable, str(ROOT / "docs" / "peer_step_times.py"), str(target), str(tmp_path / "script.py"), str(code)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False, timeout=60)
    assert done.returncode == code
    times = json.loads(target.read_text())["step_ns"]
    assert len(times) == 2
    assert min(times) > 50_000  # nanoseconds to sum 20,000 numbers


def test_a_quantile_with_too_few_steps_behind_it_is_null():
    figures = clock.quantiles_us("x", np.arange(1, 1001) * 1000)
    assert figures == {"x_us_p50": 500.0, "x_us_p99": 990.0, "x_us_p999": 999.0, "x_us_p9999": None, "x_us_max": 1000.0}
    assert clock.quantiles_us("x", np.arange(10_000))["x_us_p9999"] is not None


def test_the_floor_has_the_median_that_was_asked_for():
    assert 15_000 < np.median(clock.floor_samples(30_000, 200)) < 60_000


def refused(capsys, *arguments: str) -> str:
    """What is said when nothing is timed."""
    assert main(["bench", *arguments, "--json"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "not timed" in told.err
    return told.err


def test_plans_whose_slots_are_wrong_are_not_timed(capsys, monkeypatch):
    monkeypatch.setattr(episode, "Scheduler", lambda **sizes: Scheduler(**(sizes | {"block_size": 8})))
    assert "slots" in refused(capsys, "scheduler", "--smoke")


def test_plans_that_lose_a_committed_id_are_not_timed(capsys, monkeypatch):
    commit = load.Answers.commit

    def commit_others(self, scheduler, plan):
        return commit(load.Answers((self.bank + 1) % load.VOCAB_SIZE, self.starts), scheduler, plan)

    monkeypatch.setattr(load.Answers, "commit", commit_others)
    assert "next input" in refused(capsys, "scheduler", "--smoke")


def test_a_prefix_that_is_not_found_again_is_not_timed(capsys, monkeypatch):
    monkeypatch.setattr(prefix, "Scheduler", lambda **sizes: Scheduler(**sizes, enable_prefix_caching=False))
    assert "cached" in refused(capsys, "prefix", "--smoke")


def test_a_fork_that_shares_nothing_is_not_timed(capsys, monkeypatch):
    """In place of the fork there comes a table of the same length with blocks of its own."""

    class Pool:
        def __init__(self, *sizes: int) -> None:
            self.pool = BlockPool(*sizes)

        def __getattr__(self, name):
            return getattr(self.pool, name)

        def table(self):
            return Table(self.pool.table())

    class Table:
        def __init__(self, table) -> None:
            self.table = table

        def __getattr__(self, name):
            return getattr(self.table, name)

        def fork(self):
            other = self.table.pool.table()
            other.append(self.table.num_tokens)
            return other

    monkeypatch.setattr(prefix, "BlockPool", Pool)
    assert "holds every block of its parent" in refused(capsys, "prefix", "--smoke")


def test_keys_without_their_parents_are_not_timed(capsys, monkeypatch):
    class Parentless:
        def __init__(self, **settings: object) -> None:
            self.hasher = BlockHasher(**settings)

        def keys(self, tokens: list[int]) -> list[bytes]:
            return [self.hasher.keys(tokens[i : i + 16])[0] for i in range(0, len(tokens) // 16 * 16, 16)]

    monkeypatch.setattr(hash_bench, "BlockHasher", Parentless)
    assert "depends on its first token" in refused(capsys, "hash", "--smoke")


def test_a_pool_that_saw_no_use_is_not_called_aged():
    fresh = Scheduler(num_blocks=500, block_size=16, vocab_size=32_000, max_model_len=2048, max_num_seqs=32)
    with pytest.raises(row.WrongAnswerError, match="aged"):
        load._check_aged(fresh, 500)
    load.age(fresh, np.random.default_rng(0))
    load._check_aged(fresh, 500)
    fresh.audit()


def test_a_peers_figures_stand_beside_ours_with_the_ratio(capsys, tmp_path):
    peer = tmp_path / "peer.jsonl"
    peer.write_text(
        'noise\n{"peer": "other", "running": 3, "caching": true, "step_us": {"p50": 1000.0, "p99": 2000.0}, "ns_per_seq": 5}\n'
    )
    (one,) = bench(capsys, "scheduler", "--running", "3", "--blocks", "1k", "--steps", "8", "--peer-json", str(peer))
    assert (one["peer"], one["peer_step_us_p50"]) == ("other", 1000.0)
    assert one["ratio_step_us_p50"] == pytest.approx(one["step_us_p50"] / 1000, abs=1e-5)


def test_a_missing_peer_file_is_refused_by_name(capsys):
    assert main(["bench", "hash", "--smoke", "--peer-json", "/no/such/file"]) == 2
    assert "peer_json" in capsys.readouterr().err


@pytest.mark.parametrize("bad", [["--running", "0"], ["--running", "many"], ["--case", "none"], ["--steps", "-1"]])
def test_a_bad_option_ends_with_code_2(bad, capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "scheduler", *bad])
    assert end.value.code == 2
    assert bad[0] in capsys.readouterr().err


def test_the_table_shows_what_the_json_lines_say(capsys):
    assert main(["bench", "pool", "--smoke"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == KEYS["pool"]
    assert [line.split()[4] for line in lines] == ["ours", "mutex", "crossbeam", "ours", "mutex"]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    """A random model of two layers as a directory."""
    pytest.importorskip("torch", reason="generate needs the extra `engine`")
    from tests.engine.tiny_llama import make_model, make_tokenizer

    folder = tmp_path_factory.mktemp("tiny")
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("default")  # the peer's own
def test_generate_has_the_promised_keys_and_its_peer_beside_it(tiny_folder, capsys):
    (one,) = bench(capsys, "generate", "--smoke", "--model", str(tiny_folder), "--peer", "transformers")
    assert [key for key in one if key in KEYS["generate"]] == KEYS["generate"]
    assert one["output_tokens_per_s"] > 0
    assert one["ratio_output_tokens_per_s"] > 0
    assert 0 < one["linear_share"] < 1
    assert 0 <= one["kv_waste"] < 1


def test_generate_is_not_timed_when_a_batch_answers_otherwise_than_its_requests_alone(tiny_folder, capsys, monkeypatch):
    from blocktable.bench import generate

    answer = generate.Ours.answer

    def wrong(self, prompts, output):
        """Every answer begins with the number of prompts that ran with it."""
        return [[len(prompts), *ids[1:]] for ids in answer(self, prompts, output)]

    monkeypatch.setattr(generate.Ours, "answer", wrong)
    assert "alone" in refused(capsys, "generate", "--smoke", "--model", str(tiny_folder))


needs_server = pytest.mark.skipif(
    sys.platform != "linux" or find_spec("uvicorn") is None, reason="needs the extra `server`, and Linux"
)

LOAD_KEYS = ["step_cpu_us_p50", "step_cpu_us_p99", "late_ms_p50", "late_ms_p99"]


@needs_server
def test_serve_tells_what_streams_cost_and_what_the_same_costs_without(capsys):
    (one,) = bench(capsys, "serve", "--smoke")
    assert [key for key in one if key in KEYS["serve"]] == KEYS["serve"]
    assert {*LOAD_KEYS, *(f"alone_{key}" for key in LOAD_KEYS), "ratio_step_cpu_us_p99"} <= one.keys()
    assert 0 < one["events_per_token"] <= 1
    assert one["alone_events_per_token"] == 1 / 20, "one piece for each answer"


@needs_server
def test_serve_times_no_server_whose_streams_say_something_else(capsys, monkeypatch):
    from blocktable.bench import stream_client

    streamed = stream_client._streamed

    def cut(body: bytes) -> tuple[list[str], int]:
        texts, count = streamed(body)
        return texts[:-1], count

    monkeypatch.setattr(stream_client, "_streamed", cut)
    assert "in one piece" in refused(capsys, "serve", "--smoke")


@needs_server
def test_dashboard_times_steps_with_the_page_open_and_closed(capsys):
    (one,) = bench(capsys, "dashboard", "--smoke")
    assert [key for key in one if key in KEYS["dashboard"]] == KEYS["dashboard"]
    assert one["open_step_ms"] >= one["step_ms"]
    assert one["closed_step_ms"] >= one["step_ms"]


@needs_server
def test_dashboard_times_no_map_that_lacks_blocks(capsys, monkeypatch):
    from blocktable.bench import dashboard

    look = dashboard._look
    monkeypatch.setattr(dashboard, "_look", lambda server, path: look(server, path)[:1000])
    assert "byte for each block" in refused(capsys, "dashboard", "--smoke")


@needs_server
def test_serve_measures_any_server_by_its_address_and_process_beside_ours(tiny_folder, capsys):
    from blocktable.bench.server_under_test import blocktable_server

    with blocktable_server(str(tiny_folder), {"dtype": "float32", "num_blocks": 200, "max_model_len": 200}) as other:
        where = ["--url", other.url, "--process-id", str(other.process_id)]
        (one,) = bench(capsys, "serve", "--smoke", "--model", str(tiny_folder), *where)
    assert [key for key in one if key in KEYS["serve"]] == KEYS["serve"]
    assert (one["case"], one["peer"]) == ("chat", other.url)
    assert one["ratio_requests_per_s"] > 0
    assert one["peer_tokens_per_s"] > 0


@pytest.mark.slow
def test_a_gguf_file_is_written_for_a_peer_that_reads_none(smollm2_gguf, tmp_path):
    """The same weights, config and words."""
    import torch

    from blocktable.bench.plain_checkpoint import write_plain_checkpoint
    from blocktable.model.loader import load_model

    write_plain_checkpoint(str(smollm2_gguf), tmp_path)
    options = {"dtype": "float32", "device": "cpu", "self_check": False}
    plain, packed = load_model(str(tmp_path), **options), load_model(str(smollm2_gguf), **options)
    theirs = packed.model.state_dict()
    assert all(torch.equal(weight, theirs[name]) for name, weight in plain.model.state_dict().items())
    said = [loaded.tokenizer.apply_chat_template([{"role": "user", "content": "Hé"}]) for loaded in (plain, packed)]
    assert said[0] == said[1]


def test_a_file_that_is_no_model_is_not_written(tmp_path):
    from blocktable.bench.plain_checkpoint import write_plain_checkpoint
    from blocktable.errors import ModelLoadError

    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match="as a directory"):
        write_plain_checkpoint(str(tmp_path / "x.gguf"), tmp_path / "out")


def test_the_peer_gets_its_settings_unless_the_environment_says_others(tmp_path, monkeypatch):
    from blocktable.bench import server_under_test

    line = [
        sys.executable,
        "-c",
        "import os; print(*(os.environ[n] for n in ('VLLM_CPU_KVCACHE_SPACE', 'VLLM_CPU_NUM_OF_RESERVED_CPU')))",
    ]
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    started = server_under_test._Started(line, tmp_path / "log", server_under_test.VLLM_SETTINGS)
    started.process.wait()
    assert started.log.read_text().split() == ["7", "0"]


def test_serve_refuses_an_address_without_a_process(capsys):
    assert main(["bench", "serve", "--model", "smollm2", "--url", "http://127.0.0.1:1"]) == 2
    assert "process_id" in capsys.readouterr().err


def test_the_first_text_is_no_head_and_no_role():
    from blocktable.bench import stream_client

    role = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    text = b'data: {"choices": [{"delta": {"content": "x"}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\n\r\n4a\r\n"
    assert stream_client._end_of_first_text(head + role + text + text) == len(head + role + text)
    assert stream_client._end_of_first_text(head + b'{"choices": []}') == len(head) + 15


@needs_server
def test_an_answer_that_breaks_off_is_not_counted():
    from blocktable.bench import stream_client
    from blocktable.errors import BlocktableError

    assert stream_client._dechunked(b"3\r\nabc\r\n0\r\n\r\n") == b"abc"
    with pytest.raises(BlocktableError, match="not whole"):
        stream_client._dechunked(b"3\r\nabc\r\n")
    with pytest.raises(BlocktableError, match="ends with"):
        stream_client._streamed(b'data: {"error": {}}\n\n')

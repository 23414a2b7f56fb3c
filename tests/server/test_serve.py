"""Promise: `blocktable serve`, as an operator runs it, answers the official client: a model's directory, a file of keys, two
processes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from blocktable.server.tenants import new_key

from .live import wait_until

PATIENCE_S = 120


class Command:
    """The command, ready, and the keys of two tenants."""

    def __init__(self, folder: Path, model: Path, *flags: str) -> None:
        self.keys, lines = zip(*(new_key(tenant) for tenant in ("first", "second")))
        (folder / "keys").write_text("\n".join(lines))
        command = [sys.executable, "-m", "blocktable", "serve", str(model), "--served-model-name", "tiny", "--port", "0"]
        command += ["--admin-port", "0", "--api-key-file", str(folder / "keys"), "--num-blocks", "256", "--block-size", "8"]
        command += ["--no-self-check", "--num-threads", "1", *flags]
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"HF_HUB_OFFLINE": "1"})
        wait_until(lambda: "ready after" in self.log.read_text() or self.process.poll() is not None, "it does not start")
        found = dict(re.findall(r"(serves|admin) at +(\S+)", self.log.read_text()))
        assert found, self.log.read_text()
        self.url, self.admin_url = found["serves"], found["admin"]

    def client(self, tenant: int = 0) -> openai.OpenAI:
        http = httpx.Client(trust_env=False, verify=False)
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.keys[tenant], max_retries=0, http_client=http)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0


@pytest.fixture(scope="module")
def command(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    one = Command(tmp_path_factory.mktemp("serve"), tiny_dir, "--max-answers=8")
    yield one
    one.end()


def test_a_chat_is_streamed_and_is_the_same_in_one_piece(command: Command) -> None:
    with command.client() as client:
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 40}
        whole = client.chat.completions.create(**ask)
        stream = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(piece.choices[0].delta.content for piece in stream[:-1]) == whole.choices[0].message.content
    assert stream[-1].usage.completion_tokens == whole.usage.completion_tokens == 40


def test_log_probabilities_and_penalties_cross_the_processes(command: Command) -> None:
    """Streamed or not, and what only the engine's process can refuse."""
    with command.client() as client:
        ask = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 12}
        ask |= {"logprobs": True, "top_logprobs": 2, "frequency_penalty": 1.5, "logit_bias": {"65": 4}, "n": 2, "seed": 1}
        whole = client.chat.completions.create(**ask)
        streamed: list[list[Any]] = [[], []]
        for event in client.chat.completions.create(**ask, stream=True):
            for choice in event.choices:
                streamed[choice.index] += [] if choice.logprobs is None else choice.logprobs.content
        for place, choice in enumerate(whole.choices):
            assert len(choice.logprobs.content) == 12
            for ours, theirs in zip(choice.logprobs.content, streamed[place], strict=True):
                assert (ours.token, ours.bytes) == (theirs.token, theirs.bytes)
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
                assert [one.token for one in ours.top_logprobs] == [one.token for one in theirs.top_logprobs]
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt="x", logit_bias={"272": 1})
        assert caught.value.param == "logit_bias[272]"
        with pytest.raises(openai.BadRequestError, match="leave a token") as caught:
            client.completions.create(model="tiny", prompt="x", extra_body={"bad_words": ["e"], "allowed_token_ids": [68]})
        assert (caught.value.param, caught.value.code) == ("allowed_token_ids", "fields_disagree")


def test_two_tenants_share_nothing_across_the_processes(command: Command) -> None:
    def cached(tenant: int) -> int:
        with command.client(tenant) as client:
            answer = client.completions.create(model="tiny", prompt=list(range(100, 180)), max_tokens=1)
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached(0), cached(1), cached(0), cached(1)] == [0, 0, 79, 79]


def test_refusals_are_the_same_as_in_one_process(command: Command) -> None:
    with command.client() as client:
        with pytest.raises(openai.BadRequestError, match="not served yet") as caught:
            client.completions.create(model="tiny", prompt="x", echo=True)
        assert caught.value.param == "echo"
        with pytest.raises(openai.BadRequestError, match=r"0\.\.20") as caught:
            client.completions.create(model="tiny", prompt="x", logprobs=21)
        assert caught.value.param == "logprobs"
        with pytest.raises(openai.BadRequestError, match="more than 8"):
            client.completions.create(model="tiny", prompt="x", n=9)
        with pytest.raises(openai.BadRequestError) as only_the_engine_knows:
            client.completions.create(model="tiny", prompt="x", extra_body={"priority": 5})
        assert only_the_engine_knows.value.param == "priority"
    answer = httpx.get(f"{command.url}/v1/models", trust_env=False)
    assert answer.status_code == 401
    assert httpx.get(f"{command.url}/livez", trust_env=False).status_code == 200


def test_the_log_has_a_line_for_each_request_and_no_prompt(command: Command) -> None:
    with command.client(1) as client:
        client.completions.create(model="tiny", prompt="a secret of the client", max_tokens=1)
    wait_until(lambda: "second" in command.log.read_text(), "no line came")
    text = command.log.read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert any(line.get("tenant") == "second" for line in lines)
    assert "secret" not in text


def test_the_keys_are_read_again_on_sighup_and_nobody_is_dropped(command: Command) -> None:
    """Who streams goes on, though its key is gone; a file that is bad changes nothing."""
    path = command.log.parent / "keys"
    before = path.read_text()
    key, line = new_key("third")

    def status(given: str) -> int:
        headers = {"authorization": f"Bearer {given}"}
        return httpx.get(f"{command.url}/v1/models", headers=headers, trust_env=False).status_code

    def read_again(text: str, event: str) -> None:
        told = command.log.read_text().count(event)
        path.write_text(text)
        command.process.send_signal(signal.SIGHUP)
        wait_until(lambda: command.log.read_text().count(event) > told, event)

    assert [status(one) for one in (command.keys[0], key)] == [200, 401]
    with command.client() as client:
        ask = {"model": "tiny", "prompt": "Once", "max_tokens": 100, "temperature": 0, "extra_body": {"ignore_eos": True}}
        stream = client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        first = next(stream)
        read_again(line, "server.keys_read")
        assert [status(one) for one in (command.keys[0], key)] == [401, 200]
        *_, last = [first, *stream]
        assert last.usage.completion_tokens == 100
    read_again("third in the clear", "server.keys_refused")
    assert "in the clear" not in command.log.read_text()
    assert status(key) == 200
    read_again(before, "server.keys_read")
    assert [status(one) for one in (command.keys[0], key)] == [200, 401]


def test_a_storm_of_sighups_while_the_file_changes_drops_nobody_and_lets_nobody_in(command: Command) -> None:
    """One tenant is in every version of the file, one in every other, one in none."""
    path = command.log.parent / "keys"
    first, second = path.read_text().splitlines()
    is_over = threading.Event()

    def count(event: str) -> int:
        return command.log.read_text().count(event)

    def read_again(text: str) -> None:
        new = path.with_name("new keys")
        new.write_text(text)
        new.rename(path)
        command.process.send_signal(signal.SIGHUP)

    def storm() -> None:
        while not is_over.wait(0.01):
            read_again(first)
            read_again(f"{first}\n{second}")

    def status(key: str) -> int:
        ask = {"prompt": "Once", "max_tokens": 3}
        headers = {"authorization": f"Bearer {key}"}
        return httpx.post(f"{command.url}/v1/completions", json=ask, headers=headers, trust_env=False).status_code

    num_read, num_refused = count("server.keys_read"), count("server.keys_refused")
    thread = threading.Thread(target=storm)
    thread.start()
    try:
        with command.client() as client:
            ask = {"model": "tiny", "prompt": "Once", "max_tokens": 100, "temperature": 0, "extra_body": {"ignore_eos": True}}
            stream = client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
            found = {key: {status(key) for _ in range(20)} for key in (*command.keys, new_key("first")[0])}
            *_, last = stream
            assert last.usage.completion_tokens == 100
    finally:
        is_over.set()
        thread.join()
    assert list(found.values()) == [{200}, {200, 401}, {401}]
    assert count("server.keys_read") > num_read + 20
    assert count("server.keys_refused") == num_refused
    wait_until(lambda: status(command.keys[1]) == 200, "the last file counts")

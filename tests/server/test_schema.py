"""Promise: the server does what its document says, whatever is sent: schemathesis, with all its checks, finds nothing in any
operation."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from blocktable import AsyncLLM
from blocktable.server import app
from blocktable.server.limits import Limits
from blocktable.server.tenants import Tenants
from tests.engine.ways import check_empty

from .conftest import MakeServer
from .live import PATIENCE_S
from .test_http_crowd import settled
from .test_serve import Command

KEY = "a-key"
HOOKS = Path(__file__).with_name("schema_checks.py")


def run(url: str, seed: int, examples: int, phases: str, tmp_path: Path, key: str = KEY) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{url}/openapi.json", "--header"]
    command += [f"Authorization: Bearer {key}", "--checks", "all", "--exclude-checks", "positive_data_acceptance"]
    command += ["--phases", phases, "--max-examples", str(examples), "--seed", str(seed), "--no-color", "--warnings", "off"]
    # The machine may have something else to do for a minute.
    command += ["--request-timeout", "120", "--max-response-time", "120", "--continue-on-failure"]
    environment = os.environ | {"SCHEMATHESIS_HOOKS": str(HOOKS)}
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)


@pytest.fixture
def guarded(make_async: Callable[..., AsyncLLM], serve: MakeServer) -> Any:
    """An engine with few tokens, so that no answer is long, and with priorities, so that none is refused."""
    engine = make_async(policy="priority", max_num_seqs=32, num_blocks=1024, max_num_batched_tokens=512)
    server = serve(engine, Tenants.of_keys([("tenant", KEY)]), limits=Limits(max_request_s=0.2))
    yield server, engine
    check_empty(engine)


HOW_MUCH = pytest.mark.parametrize(
    "examples, phases",
    [
        pytest.param(8, "fuzzing", id="a few"),
        pytest.param(200, "examples,coverage,fuzzing,stateful", id="many", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
    ],
)


@HOW_MUCH
def test_schemathesis_finds_nothing(
    examples: int, phases: str, guarded: Any, seed: int, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    server, _ = guarded
    done = run(server.url, seed, examples, phases, tmp_path)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    tell(next(line.strip() for line in done.stdout.splitlines() if "generated" in line))


@HOW_MUCH
def test_schemathesis_finds_nothing_in_two_processes(
    examples: int, phases: str, tiny_dir: Path, seed: int, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """The same as an operator runs it, and no block is left behind."""
    flags = ["--policy=priority", "--max-num-seqs=32", "--max-num-batched-tokens=512", "--max-request-s=0.2"]
    command = Command(tmp_path, tiny_dir, *flags)
    try:
        done = run(command.url, seed, examples, phases, tmp_path, command.keys[0])
        assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]

        async def none_is_left() -> None:
            async with httpx.AsyncClient(base_url=command.admin_url) as admin:
                assert (await settled(admin, PATIENCE_S))["blocktable:engine_deaths"] == 0

        asyncio.run(none_is_left())
    finally:
        command.end()
    tell(next(line.strip() for line in done.stdout.splitlines() if "generated" in line))


def test_a_document_that_promises_more_is_caught(
    guarded: Any, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the document calls right what is refused: a penalty of any size."""
    server, _ = guarded
    right = app.document

    def wrong(*about: Any) -> Any:
        told = right(*about)
        told["components"]["schemas"]["CompletionRequest"]["properties"]["length_penalty"] = {"type": "number"}
        told["components"]["schemas"]["CompletionRequest"]["required"].append("length_penalty")
        told["paths"] = {"/v1/completions": told["paths"]["/v1/completions"]}
        return told

    monkeypatch.setattr(app, "document", wrong)
    done = run(server.url, seed, 5, "fuzzing", tmp_path)
    assert done.returncode == 1
    assert "right by the document, and refused" in done.stdout

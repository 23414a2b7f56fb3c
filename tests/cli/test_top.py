"""`blocktable top` paints what a server says, in as many lines as there are, and lets no client steer the terminal."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from blocktable.cli import top
from blocktable.cli.command import main
from blocktable.server.packed_map import BlockMap, pack

USES = bytes([0] + [3] * 30 + [2] * 19 + [1] * 50)
MAP = BlockMap(USES, bytes(100), [])
REQUESTS = [{"request_id": "cmpl-\x1b[31m1", "place": "running", "waits_for": None}]


def state(steps: int, now_s: float, started_s: float = 5.0) -> dict[str, Any]:
    """What /dashboard/state says after so many steps of 10 ms, of which the scheduler took 40 us."""
    return {
        "model": "tiny",
        "state": "ready",
        "num_blocks": 100,
        "block_size": 16,
        "stats": {"steps": steps, "running": 1, "waiting": 2, "scheduled_tokens": steps * 8},
        "scheduler_cpu_ns": steps * 40_000,
        "steps_ns": steps * 10_000_000,
        "started_s": started_s,
        "now_s": now_s,
    }


def screen(before: dict[str, Any] | None = None, **size: Any) -> list[str]:
    look = None if before is None else top.Look(before, MAP, REQUESTS)
    return list(
        top.paint(top.Look(state(50, 12.0), MAP, REQUESTS), look, **{"width": 80, "height": 24, "has_colours": False} | size)
    )


def test_a_screen_tells_the_pool_the_steps_and_the_requests() -> None:
    lines = screen(state(0, 10.0), width=90)
    assert lines[0] == "tiny  ready  100 blocks of 16 tokens"
    assert lines[1] == "free 50  cached 19  held 30  shared 0  pinned 0  parked 0"
    assert "".join(lines[2:4]) == " " + "#" * 30 + "c" * 19 + "." * 50
    assert lines[4] == "running 1  waiting 2  steps/s 25.0  scheduler 40 us a step  step 10.0 ms  tokens/s 200"
    assert lines[-1].split() == ["cmpl-?[31m1", "running"], "what a client chose steers nothing"


def test_figures_of_a_time_need_two_looks_at_the_same_engine() -> None:
    assert screen()[4] == screen(state(40, 11.0, started_s=4.0))[4] == "running 1  waiting 2"


@pytest.mark.parametrize(("width", "height"), [(10, 3), (40, 10), (200, 60)])
def test_it_keeps_within_the_terminal(width: int, height: int) -> None:
    lines = screen(state(0, 10.0), width=width, height=height)
    assert max(map(len, lines)) <= width


def test_a_cell_of_many_blocks_shows_the_commonest_use() -> None:
    assert list(top.map_rows(USES, columns=10, rows=1, has_colours=False)) == ["###cc....."]
    painted = "".join(top.map_rows(USES, columns=10, rows=1, has_colours=True))
    assert re.findall(r"\x1b\[(\d+)m█", painted) == ["34"] * 3 + ["36"] * 2 + ["37"] * 5


class Server(BaseHTTPRequestHandler):
    """Says the same as an admin port, two seconds and ten steps later each time."""

    looks = 0
    dead_looks = 0
    """So many more are answered for an engine that is not there."""
    last_look = 10**9

    def do_GET(self) -> None:
        if Server.dead_looks or Server.looks >= Server.last_look:
            self.send_response(503 if Server.dead_looks else 500)
            self.end_headers()
            self.wfile.write(json.dumps({"error": "it died\x1b[2J", "state": "starting"}).encode())
            Server.dead_looks = max(0, Server.dead_looks - 1)
            return
        if self.path == "/dashboard/state":
            Server.looks += 1
            body = json.dumps(state(10 * Server.looks, 2.0 * Server.looks)).encode()
        else:
            body = pack(MAP) if self.path == "/dashboard/blocks" else json.dumps({"waiting": REQUESTS}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_once_looks_twice_and_prints_plain_text(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", url + "/", "--once", "--every", "0.05"]) == 0
    out = capsys.readouterr().out
    assert "steps/s 5.0" in out
    assert "\x1b" not in out


def test_no_server_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "http://127.0.0.1:9"]) == 2
    assert re.fullmatch(r"blocktable: error: http://127.0.0.1:9/dashboard/state: .*refused\n", capsys.readouterr().err)


def test_an_engine_that_is_started_again_is_shown_and_looked_at_again(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "dead_looks", 3)
    monkeypatch.setattr(Server, "last_look", Server.looks + 5)
    assert main(["top", "--url", url, "--every", "0.05"]) == 2
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert lines[:3] == [f"{url}/dashboard/state: starting: it died?[2J"] * 3, "what it says steers nothing"
    assert lines[3] == "tiny  ready  100 blocks of 16 tokens"
    assert "steps/s" not in lines[7]
    assert "Internal Server Error" in said.err


def test_once_an_engine_that_is_started_again_is_an_error(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Server, "dead_looks", 1)
    assert main(["top", "--url", url, "--once", "--every", "0.05"]) == 2
    assert "starting: it died" in capsys.readouterr().err


@pytest.mark.parametrize("said", [b"<html>", b"[]", b"{}"])
def test_who_is_no_server_of_ours_is_said_in_one_line(
    said: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "_get", lambda url: said)
    assert main(["top", "--once"]) == 2
    assert "not as the admin port does" in capsys.readouterr().err

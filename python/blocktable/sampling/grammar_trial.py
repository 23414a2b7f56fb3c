"""Compiles a grammar for the first time in a process of its own, which may be killed: some few bytes can ask for hours.

Before: `grammar.py` has a grammar from a client. After: it compiles it where it is needed, knowing that this takes less than
`TRIAL_CPU_S`. Always: a grammar that takes longer, or more than `TRIAL_BYTES`, costs its own trial and nothing else; the
process ends with the one that started it. `python -m` runs it: a frame with the tokenizer, then one a grammar, in JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

TRIAL_CPU_S = 2
"""Whole seconds of CPU: a busy machine makes no difference."""

TRIAL_WALL_S = 30.0

TRIAL_BYTES = 2**30
"""Of memory beside what the tokenizer takes."""

LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 300_000,  # some 20 ms, where it is compiled
    "step_lexer_fuel": 70_000,  # some 5 ms a mask
    "step_max_items": 50_000,  # some 2.5 ms a mask
    "max_lexer_states": 20_000,  # 1 to 2 kB each
    "max_grammar_size": 50_000,
    "max_items_in_row": 2_000,
}
"""What one grammar may cost where llguidance counts; times are those that it tells for its units."""

PATIENCE_S = 1.0
"""Seconds that a process that closed its pipe has to end."""

OUT_OF_MEMORY = (-signal.SIGABRT, 1)
"""How a trial without memory ends: in Rust, and in Python."""

ENDED = "was not compiled: the engine has ended"
"""Why a grammar is refused that nobody will need."""

_HEAD = struct.Struct("<I")


def start(tokenizer: LLTokenizer, source: str, num_states: int | None = None) -> tuple[LLMatcher, bytes]:
    """A matcher of that grammar and its first mask. What is wrong stands in the matcher. `num_states`: of its lexer at most, if
    that is to be less than the limit."""
    from llguidance import LLMatcher, LLParserLimits

    own = {} if num_states is None else {"max_lexer_states": num_states}
    limits = LLParserLimits(**(LIMITS | own), verbose_errors=False)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
    return matcher, matcher.compute_bitmask()


def make_tokenizer(native: str, num_tokens: int, eos_token_id: int) -> LLTokenizer:
    """What all grammars of a model share, of a native tokenizer's JSON."""
    from llguidance import LLTokenizer

    return LLTokenizer(native, n_vocab=num_tokens, eos_token=eos_token_id)


class Trial:
    """The other process, started at the first trial and again after one that killed it. Safe to call from several threads."""

    def __init__(self, native: str, num_tokens: int, eos_token_id: int) -> None:
        self._first = {"native": native, "num_tokens": num_tokens, "eos_token_id": eos_token_id}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def check(self, source: str) -> str | None:
        """Why this grammar is refused: it takes too long. None for any other, right or wrong."""
        with self._lock:
            if self._closed.is_set():
                return ENDED
            try:
                process = self._running()
                _write(process.stdin, {"source": source})
                _read(process.stdout, time.monotonic() + TRIAL_WALL_S)
            except (EOFError, BrokenPipeError):
                why = _why(self._end(PATIENCE_S))
            except TimeoutError:
                self._end()
                why = f"takes more than {TRIAL_WALL_S:g} s to compile"
            else:
                return None
            return ENDED if self._closed.is_set() else why

    def close(self) -> None:
        """End the process, whatever it compiles, for good."""
        self._closed.set()
        process = self._process
        if process is not None:
            process.kill()  # who waits for it, and has the lock, waits no longer
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            command = [sys.executable, "-m", __name__]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            _write(self._process.stdin, self._first)
            _read(self._process.stdout, time.monotonic() + TRIAL_WALL_S)
        return self._process

    def _end(self, patience_s: float = 0.0) -> int:
        """Returns the exit code; that of a process that ends by itself in time is its own."""
        process, self._process = self._process, None
        if process is None:
            return 0
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                pipe and pipe.close()
        return process.wait()

    def __del__(self) -> None:
        self._end()


def _why(code: int) -> str:
    """What the end of a trial with that exit code says of its grammar."""
    if code == -signal.SIGXCPU:
        return f"takes more than {TRIAL_CPU_S} s to compile"
    if code in OUT_OF_MEMORY:
        return f"takes more than {TRIAL_BYTES >> 20} MiB to compile"
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"was not compiled: the process that tried it ended by {how}"


def main() -> None:
    """Answer frames until there are no more; then end at once, whatever is compiled just now."""
    frames: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_hear, args=(frames,), daemon=True).start()
    tokenizer = make_tokenizer(**frames.get())
    while True:
        with os.fdopen(os.dup(1), "wb") as tell:
            _write(tell, {})
        source = frames.get()["source"]
        _bound()
        start(tokenizer, source)


def _hear(frames: queue.SimpleQueue[dict[str, Any]]) -> None:
    with os.fdopen(0, "rb") as pipe:
        while True:
            try:
                frames.put(_read(pipe))
            except EOFError:
                os._exit(0)


def _bound() -> None:
    """From here on so much CPU and so much memory, where the system can hold a process to that."""
    try:
        import resource
    except ImportError:
        return
    # The end by a limit leaves no picture of the memory behind.
    _lower(resource.RLIMIT_CORE, 0)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + TRIAL_CPU_S)
    # The pages of the address space now, and as much as a grammar may take.
    with contextlib.suppress(FileNotFoundError), open("/proc/self/statm") as sizes:
        now = int(sizes.read().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, now + TRIAL_BYTES)


def _lower(limit: int, wanted: int) -> None:
    """Have so much of it at most, or what the system lets this process have, if that is less."""
    import resource

    _, most = resource.getrlimit(limit)
    resource.setrlimit(limit, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def _write(pipe: IO[bytes] | None, record: dict[str, Any]) -> None:
    if pipe is None:
        raise EOFError
    body = json.dumps(record).encode()
    pipe.write(_HEAD.pack(len(body)) + body)
    pipe.flush()


def _read(pipe: IO[bytes] | None, until: float | None = None) -> dict[str, Any]:
    """The next frame. Raises `EOFError` at the end, `TimeoutError` when it is `until` by the monotonic clock."""
    if pipe is None:
        raise EOFError
    size = _HEAD.unpack(_bytes(pipe, _HEAD.size, until))[0]
    record: dict[str, Any] = json.loads(_bytes(pipe, size, until))
    return record


def _bytes(pipe: IO[bytes], size: int, until: float | None) -> bytes:
    came = b""
    with selectors.DefaultSelector() as ready:
        ready.register(pipe, selectors.EVENT_READ)
        while len(came) < size:
            if not ready.select(None if until is None else max(0.0, until - time.monotonic())):
                raise TimeoutError
            part = os.read(pipe.fileno(), size - len(came))
            if not part:
                raise EOFError
            came += part
    return came


if __name__ == "__main__":
    main()

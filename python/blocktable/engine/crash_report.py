"""What is left behind when the scheduler itself fails: a recording of all that entered it, to be replayed elsewhere.

Before: the step loop makes a scheduler. After: its last calls are kept in a ring; when a plan or a commit raises, they are in
a file that only its owner can read, and the error names it. As long as the ring was large enough for everything since the
start, `blocktable replay` makes the same plans again; a ring that lost its beginning can only be read (`blocktable replay
--list`). The file holds prompts, salts and outputs.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from pathlib import Path

from .._core import Scheduler

logger = logging.getLogger("blocktable.engine")


class CrashReporter:
    """Keeps the last `num_bytes` of what enters `scheduler`, which must be new; 0 keeps nothing and reports nothing."""

    def __init__(self, scheduler: Scheduler, *, num_bytes: int, folder: str | None = None) -> None:
        self._scheduler = scheduler
        self._num_bytes = num_bytes
        self._folder = Path(tempfile.gettempdir() if folder is None else folder)
        if num_bytes:
            scheduler.keep_recording(num_bytes)

    def report(self, error: BaseException) -> Path | None:
        """Write what is kept, and add the file's name to `error`. Never raises: `error` is what matters."""
        if not self._num_bytes or isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            return None
        try:
            content = self._scheduler.recorded()
            if content is None:
                return None
            path = self._folder / f"blocktable-crash-{os.getpid()}-{time.time_ns()}.btrec"
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
        except Exception:
            logger.exception("no crash report could be written to %s", self._folder)
            return None
        error.add_note(f"crash report: {path} (blocktable replay {path})")
        logger.error("the scheduler failed: %r; crash report: %s", error, path)
        return path

"""The process-wide state of torch and transformers that loading a model touches, lent and given back.

Before: `loader` is about to read files. After: everything is as it was, also after an error: torch's default dtype and random
numbers, transformers' verbosity and progress bars, Python's warning filters. Always: one load at a time in a process, since
two that overlap would put back each other's settings.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.utils import logging as transformers_logging

_ONE_LOAD = threading.RLock()


@contextmanager
def borrowed_libraries() -> Iterator[None]:
    """transformers says nothing below an error and draws no bars; all global state is put back at the end.

    What a user must know of a load comes from our own progress messages and typed errors.
    """
    with _ONE_LOAD:
        dtype = torch.get_default_dtype()
        verbosity = transformers_logging.get_verbosity()
        had_bars = transformers_logging.is_progress_bar_enabled()
        try:
            transformers_logging.set_verbosity_error()
            transformers_logging.disable_progress_bar()
            # A model built from its configuration draws random weights before the checkpoint's replace them.
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            torch.set_default_dtype(dtype)
            transformers_logging.set_verbosity(verbosity)
            if had_bars:
                transformers_logging.enable_progress_bar()

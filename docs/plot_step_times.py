"""Draws how long steps take: the share of steps that take longer than so many microseconds, one line for each file of samples.

    python docs/plot_step_times.py docs/step_times.svg "blocktable=ours.jsonl" "vLLM 0.32=peer.jsonl"

A file has JSON lines with `step_ns`, the times of the steps, as `blocktable bench scheduler --samples FILE` writes them;
all lines of a file are drawn as one. Needs matplotlib (`pip install --group plot`).
"""

import json
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "blocktable"  # the same picture is the same file

from matplotlib import pyplot as plt  # noqa: E402


def samples(path: Path) -> np.ndarray:
    """[steps] microseconds, in order of size."""
    times = [json.loads(line)["step_ns"] for line in path.read_text().splitlines() if line.startswith("{")]
    if not times:
        raise SystemExit(f"{path}: no samples")
    return np.sort(np.concatenate(times)) / 1000


def main(target: Path, named: list[str]) -> None:
    """Draw every `NAME=FILE`."""
    figure, axes = plt.subplots(figsize=(8, 3.6), layout="constrained")
    for one in named:
        name, _, path = one.rpartition("=")
        times = samples(Path(path))
        beyond = 1 - np.arange(len(times)) / len(times)
        keep = np.unique(np.round(len(times) * (1 - np.geomspace(1, 1 / len(times), 400))).astype(int).clip(0, len(times) - 1))
        axes.step(
            times[keep], beyond[keep], where="post", label=f"{name}: {len(times):,} steps, median {np.median(times):,.0f} us"
        )
    axes.set(xscale="log", yscale="log", xlabel="plan + commit, us", ylabel="share of steps that take longer")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend(loc="lower left")
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])

"""Times every pure decode step of vLLM's scheduler while a script of somebody else's drives it.

    peer/bin/python docs/peer_step_times.py steps.jsonl vllm_scheduler.py --running 1024

Run by the interpreter that has vLLM. The script is executed as it is, with its options; before that, `Scheduler.schedule` and
`update_from_output` are wrapped. A step counts if every running request gets one token and as many run as ever did; its time is
the CPU time of the thread in both calls, as in `blocktable bench scheduler`. Writes one JSON line with `step_ns`, for
`docs/plot_step_times.py`, even if the script fails.
"""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from time import thread_time_ns
from typing import Any


class StepTimes:
    """Steps of one scheduler class, by how many requests they ran."""

    def __init__(self, scheduler: type) -> None:
        self._planned_ns, self._is_decode, self._running = 0, False, 0
        self.step_ns: dict[int, list[int]] = {}
        self._wrap(scheduler, "schedule", self._after_plan)
        self._wrap(scheduler, "update_from_output", self._after_update)

    def of_the_largest(self) -> list[int]:
        """[steps] nanoseconds, of the steps that ran the most requests."""
        return self.step_ns[max(self.step_ns)] if self.step_ns else []

    def _wrap(self, scheduler: type, name: str, after: Callable[[Any, int], None]) -> None:
        call = getattr(scheduler, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            start = thread_time_ns()
            result = call(*arguments, **options)
            after(result, thread_time_ns() - start)
            return result

        setattr(scheduler, name, timed)

    def _after_plan(self, plan: Any, spent_ns: int) -> None:
        self._planned_ns, self._running = spent_ns, len(plan.num_scheduled_tokens)
        self._is_decode = plan.total_num_scheduled_tokens == self._running > 0

    def _after_update(self, _: Any, spent_ns: int) -> None:
        if self._is_decode:
            self.step_ns.setdefault(self._running, []).append(self._planned_ns + spent_ns)


def main(target: Path, script: str, options: list[str]) -> None:
    """Run `script` with `options`, and leave its steps in `target`."""
    from vllm.v1.core.sched.scheduler import Scheduler

    times = StepTimes(Scheduler)
    sys.argv = [script, *options]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        target.write_text(json.dumps({"peer": "vllm", "step_ns": times.of_the_largest()}) + "\n")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])

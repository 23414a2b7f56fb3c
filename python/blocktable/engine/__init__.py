"""The engine: requests in, text out. `llm.py` is the door; `step_loop.py` runs plan, forward, sample, commit."""

"""The server: OpenAI's API over HTTP in one process, the engine in another.

`engine_client.py` is the seam between the two: what the HTTP side asks of an engine, wherever it runs.
"""

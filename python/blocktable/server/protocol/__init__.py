"""What goes over HTTP, as records: OpenAI's names, and vLLM's where OpenAI has none.

Before: `reading.py` makes a record of a body, or refuses it by field. After: the routes; `openapi.py` describes the same
records. Always: a field that does not exist here is refused by name; one whose feature is not served yet exists and is
refused by name.
"""

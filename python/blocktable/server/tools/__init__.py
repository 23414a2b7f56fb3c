"""Tools that a model may call: which calls stand in its text, and how it is made to write some.

Before: `chat.py` has a request with `tools`. After: `tool_use.py` says how its prompt, its sampling and its readers follow from
that; a reader (one file for each format) makes calls of a text. Always: a call that is told names a function that was offered;
every character of an answer is told, as content or as arguments, but for the markup of calls.
"""

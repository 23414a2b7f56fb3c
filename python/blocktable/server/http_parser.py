"""httptools' parser as it has to be for clients that ask for another protocol beside their request, such as Java's own, which
offers HTTP/2 with each.

Before: `http_protocol.py` has bytes. After: its callbacks. Always: such a request is read as one that does not ask, which a
server may do; httptools' own parser leaves out its body.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

CONNECT = b"CONNECT"

_httptools: Any = import_module("httptools") if find_spec("httptools") is not None else None


def parser_of(protocol: Any) -> Any:
    """A parser for uvicorn's `protocol`, which gets another one, as its `parser`, behind each request that asks."""
    parser = _PlainParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it: what comes too late is dropped
    return parser


def asks_for_another(parser: Any) -> bool:
    """Of the request whose head is complete: it comes once more, and does not ask then. What CONNECT asks for is no answer."""
    return bool(parser.should_upgrade()) and parser.get_method() != CONNECT


if _httptools is not None:

    class _PlainParser(_httptools.HttpRequestParser):  # type: ignore[misc]
        def __init__(self, protocol: Any) -> None:
            super().__init__(protocol)
            self._protocol = protocol

        def feed_data(self, data: bytes) -> None:
            protocol, parser, rest = self._protocol, self, memoryview(data)
            read = super().feed_data
            while True:
                try:
                    read(rest)
                    return
                except _httptools.HttpParserUpgrade as asked:
                    rest = rest[asked.args[0] :]
                    head = _head(protocol, parser)
                    parser = protocol.parser = parser_of(protocol)
                    read = super(_PlainParser, parser).feed_data
                    read(head)


def _head(protocol: Any, parser: Any) -> bytes:
    lines = [b"%b %b HTTP/%b" % (parser.get_method(), protocol.url, parser.get_http_version().encode())]
    lines += [b"%b: %b" % (name, value) for name, value in protocol.headers if name != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])

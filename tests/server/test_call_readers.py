"""Promise: of every format the same calls are read however its text was cut into pieces; what is no call is content, to the
character, and is held back only as long as it may become one; a call that is told names a function that is offered. Each check
has a planted fault that it catches."""

import json
import re
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from blocktable.server.tools.call_reader import CallReader
from blocktable.server.tools.forced import ForcedReader, NamedReader
from blocktable.server.tools.formats import FORMATS, format_of
from blocktable.server.tools.hermes import HermesReader
from blocktable.server.tools.json_text import BrokenError, JsonText
from blocktable.server.tools.llama3_json import Llama3JsonReader
from blocktable.server.tools.mistral import MistralReader

LOOK, GO = (
    '{"name": "look", "arguments": {"at": ["sky", {"far": 1.5e3}], "say": "a \\"} \\u00e9"}}',
    '{"name":"go","arguments":{}}',
)
AT = '{"at": ["sky", {"far": 1.5e3}], "say": "a \\"} \\u00e9"}'

Calls = list[tuple[str, str]]


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


CASES: dict[str, tuple[type[CallReader], str, str, Calls, bool]] = {
    # text: its reader, what is content, the calls, and whether they came to their end
    "a call": (HermesReader, hermes(LOOK), "", [("look", AT)], True),
    "two calls between texts": (
        HermesReader, f"Let me see.\n{hermes(LOOK, GO)}\nDone. ", "Let me see.\n\n\nDone.", [("look", AT), ("go", "{}")], True
    ),
    "white space around": (HermesReader, f" \n{hermes(GO)} \n", "", [("go", "{}")], True),
    "a text behind": (HermesReader, f"\n{hermes(GO)}\n So.", "So.", [("go", "{}")], True),
    "no call": (HermesReader, " <b> < </tool_call> a \n", " <b> < </tool_call> a \n", [], False),
    "half a marker": (HermesReader, "so <tool_", "so <tool_", [], False),
    "a marker in a marker": (HermesReader, "<tool_<tool_call>" + hermes(GO), "<tool_<tool_call>", [("go", "{}")], True),
    "a call that was not closed": (HermesReader, f"<tool_call>{LOOK}\n{hermes(GO)}", "", [("look", AT), ("go", "{}")], True),
    "a call whose end is cut off": (HermesReader, f"<tool_call>{GO}\n</tool", "</tool", [("go", "{}")], True),
    "arguments first": (
        HermesReader, '<tool_call>{"arguments": {"a": 1}, "name": "go"}</tool_call>', "", [("go", '{"a": 1}')], True
    ),
    "other words for them": (
        HermesReader, '<tool_call>{"type": "function", "name": "go", "parameters": { }}</tool_call>', "", [("go", "{ }")], True
    ),
    "no arguments": (HermesReader, '<tool_call>{"name": "go"}</tool_call>', "", [("go", "{}")], True),
    "a name in escapes": (HermesReader, '<tool_call>{"name": "\\u0067o"}</tool_call>', "", [("go", "{}")], True),
    "arguments that are cut off": (HermesReader, '<tool_call>{"name": "go", "arguments": {"a', "", [("go", '{"a')], False),
    "arguments that break": (
        HermesReader,
        '<tool_call>{"name": "go", "arguments": {"a": tru}}</tool_call>',
        "}}</tool_call>",
        [("go", '{"a": tru')],
        False,
    ),
    "a brace too many": (HermesReader, f"<tool_call>{GO}}}</tool_call>", "}</tool_call>", [("go", "{}")], True),
    **{
        f"no call: {text}": (HermesReader, f"<tool_call>{text}</tool_call>!", f"<tool_call>{text}</tool_call>!", [], False)
        for text in (
            '{"name": "nobody", "arguments": {}}',
            '{"name": "go", "arguments": "{}"}',
            '{"name": "go", "arguments": null}',
            '{"name": "go", "name": "go"}',
            '{"name": "go", "mood": 1}',
            '{"arguments": {"a": 1}}',
            '{"arguments": {"a": 1}, "name": "nobody"}',
            '{"name": 5}',
            '{"name": "g\no"}',
            "{}",
            "[]",
            "look()",
        )
    },
    "a call of Llama's": (Llama3JsonReader, '{"name": "go", "parameters": {"a": "x"}}', "", [("go", '{"a": "x"}')], True),
    "two of them behind the tag": (
        Llama3JsonReader, f"<|python_tag|>{GO}; {LOOK}", "", [("go", "{}"), ("look", AT)], True
    ),
    "and a text": (Llama3JsonReader, f"{GO}; so {LOOK}", "; so " + LOOK, [("go", "{}")], True),
    "a text first": (Llama3JsonReader, f"So: {GO}", f"So: {GO}", [], False),
    "a program": (Llama3JsonReader, "<|python_tag|>print(1)", "<|python_tag|>print(1)", [], False),
    "other JSON": (Llama3JsonReader, ' {"a": [1]}', ' {"a": [1]}', [], False),
    "a list of Mistral's": (
        MistralReader, f'So.[TOOL_CALLS] [{GO}, {LOOK[:-1]}, "id": "abcdefghi"}}]', "So.", [("go", "{}"), ("look", AT)], True
    ),
    "a list that is cut off": (MistralReader, f"[TOOL_CALLS][{GO}, ", ",", [("go", "{}")], True),
    "names and arguments": (
        MistralReader, f"[TOOL_CALLS]go{{}}[TOOL_CALLS]look {AT} So.", "So.", [("go", "{}"), ("look", AT)], True
    ),
    "with marks": (
        MistralReader, "[TOOL_CALLS]go[ARGS]{}[TOOL_CALLS]go[CALL_ID]a1b2[ARGS]{}", "", [("go", "{}"), ("go", "{}")], True
    ),
    "a name of nobody": (MistralReader, "[TOOL_CALLS]fly{}", "[TOOL_CALLS]fly{}", [], False),
    "other marks": (MistralReader, "[TOOL_CALLS]go[X]{}", "[TOOL_CALLS]go[X]{}", [], False),
    "forced calls": (ForcedReader, f"[{LOOK}, {GO}]", "", [("look", AT), ("go", "{}")], True),
    "a forced call that is cut off": (ForcedReader, '[{"name": "lo', '[{"name": "lo', [], False),
    "a second one that is cut off": (ForcedReader, f'[{LOOK}, {{"name": "g', "", [("look", AT)], True),
    "forced arguments": (NamedReader, AT, "", [("look", AT)], True),
    "forced arguments that are cut off": (NamedReader, AT[:9], "", [("look", AT[:9])], False),
}  # fmt: skip

KINDS = [HermesReader, Llama3JsonReader, MistralReader, ForcedReader, NamedReader]


def make(kind: type[CallReader], **options: Any) -> CallReader:
    return kind(("look",) if kind is NamedReader else ("look", "go"), **options)


def read(reader: CallReader, pieces: list[str]) -> tuple[str, Calls, bool]:
    """The content, the calls, and whether they came to their end."""
    content, calls, ids = "", list[list[str]](), list[str]()
    for told in [*(reader.push(piece) for piece in pieces), reader.finish()]:
        content += told.content
        for part in told.calls:
            assert (part.name is None) == (part.call_id is None) == (part.index < len(calls))
            assert part.arguments
            if part.name is not None and part.call_id is not None:
                assert part.index == len(calls)
                calls.append([part.name, ""])
                ids.append(part.call_id)
            calls[part.index][1] += part.arguments
    assert len(set(ids)) == len(ids)
    return content, [(name, arguments) for name, arguments in calls], reader.reason("stop") == "tool_calls"


def cut(text: str, places: list[int]) -> list[str]:
    marks = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[first:last] for first, last in pairwise(marks)]


def check_case(name: str) -> None:
    kind, text, *right = CASES[name]
    assert list(read(make(kind), [text])) == right
    for place in range(len(text)):
        assert list(read(make(kind), [text[:place], text[place:]])) == right
    assert list(read(make(kind), list(text))) == right


@pytest.mark.parametrize("name", CASES)
def test_a_text_is_read_the_same_in_one_piece_in_two_and_in_characters(name: str) -> None:
    check_case(name)


PARTS = [
    "<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", LOOK, GO, AT, '{"name": "look", ',
    '"arguments": ', "{", "}", "[", "]", '"', "\\", ",", ";", ":", " ", "\n", "go", "look", "tru", "true", "-0.5e+2", "01", "x",
]  # fmt: skip


def check_any(kind: type[CallReader], text: str, places: list[int]) -> None:
    whole = read(make(kind), [text])
    assert read(make(kind), cut(text, places)) == whole
    content, calls, has_called = whole
    assert {name for name, _ in calls} <= {"look", "go"}
    if has_called:
        assert all(isinstance(json.loads(arguments), dict) for _, arguments in calls)
    if not calls:
        assert content == text
    # Every character that is told stands in the text, in that order.
    left = iter(text)
    if all(arguments in text for _, arguments in calls) and len(calls) < 2:
        assert all(character in left for character in content)


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.lists(st.sampled_from(PARTS), max_size=14).map("".join), places=st.lists(st.integers(0, 400), max_size=20))
@example(text=hermes(GO, LOOK), places=[1, 30, 31])
@example(text=f"[TOOL_CALLS]go{AT}x", places=[12, 13, 14])
def test_any_text_is_read_the_same_however_it_is_cut(kind: type[CallReader], text: str, places: list[int]) -> None:
    check_any(kind, text, places)


@given(value=st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
), indent=st.sampled_from([None, 1]), is_ascii=st.booleans())  # fmt: skip
def test_any_arguments_come_as_they_were_written(value: Any, indent: int | None, is_ascii: bool) -> None:
    arguments = json.dumps({"value": value}, indent=indent, ensure_ascii=is_ascii)
    call = f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call>'
    assert read(make(HermesReader), list(call)) == ("", [("look", arguments)], True)


@given(text=st.text(st.sampled_from('{}[]",:\\ aeu0159.-+tfn\n'), max_size=12))
@example(text='{"a":01}')
@example(text='{"a":1,}')
@example(text="{,}")
@example(text='{"a":{"b":[1,]}}')
@example(text='{"a":"\\u00g0"}')
def test_what_is_read_to_its_end_is_json_and_nothing_else(text: str) -> None:
    class Object(JsonText):
        def end(self, text: str) -> int | None:
            """Behind which character it ended; None: not in this text, or it broke."""
            course = self._object()
            next(course)
            for place, character in enumerate(text):
                try:
                    course.send(character)
                except StopIteration:
                    return place + 1
                except BrokenError:
                    return None
            return None

    end = Object().end(text[1:]) if text[:1] == "{" else None
    try:
        _, right = json.JSONDecoder(parse_constant=no_constant).raw_decode(text)
    except ValueError:
        right = None
    assert (None if end is None else end + 1) == (right if text[:1] == "{" else None)


def no_constant(name: str) -> Any:
    raise ValueError(name)


def check_held(kind: type[CallReader], text: str, most: int) -> None:
    """No more than `most` characters of a text are held back at any time."""
    reader, told = make(kind), 0
    for place, character in enumerate(text):
        told += len(reader.push(character).content)
        assert place + 1 - told <= most


@pytest.mark.parametrize("kind, text, most", [
    (HermesReader, "A <b>text</b> with <tools> and </tool_call>, [lists] and {braces}; 3 <4.", 8),
    (MistralReader, "A [text] with [TOOLS] and {braces}.", 6),
    (Llama3JsonReader, 'So: {"name": "go", "parameters": {}}', 1),
    (Llama3JsonReader, '{"weather": "fine", "name": "go"}', 11),
])  # fmt: skip
def test_only_what_may_become_a_call_is_held_back(kind: type[CallReader], text: str, most: int) -> None:
    check_held(kind, text, most)


def test_arguments_come_as_they_are_written() -> None:
    reader = make(HermesReader)
    told = [reader.push(character).calls for character in hermes(LOOK)]
    parts = [part for calls in told for part in calls]
    assert [part.arguments for part in parts] == list(AT)
    assert [part.name for part in parts] == ["look"] + [None] * (len(AT) - 1)


def check_work(text: str) -> None:
    """A character is read at most twice: once more where it broke what came before."""

    class Counting(HermesReader):
        count = 0

        def _next(self) -> Any:
            self.count += 1
            return super()._next()

    reader = Counting(("go",))
    read(reader, [text])
    assert reader.count <= 2 * len(text) + 2


NESTED = '<tool_call>{"type": "' * 300

LONG = [NESTED, "<tool_call>" * 500, '<tool_call>{"name": "go", "arguments": {"a": ' + "[" * 5000, hermes(GO) * 200]


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_the_work_grows_with_the_text_alone(text: str) -> None:
    check_work(text)


def check_white_space() -> None:
    """Read in less than a second of CPU, where it took 3 s and more when it was put together again with each piece."""
    begun_s = time.thread_time()
    content, _, _ = read(make(HermesReader), ["<", *[" " * 16] * 20_000, "a"])
    assert time.thread_time() - begun_s < 1.0
    assert content == "<" + " " * 320_000 + "a"


def test_white_space_without_end_is_read_once() -> None:
    check_white_space()


def test_what_is_no_first_call_is_left_out_where_one_is_wanted() -> None:
    text = f"So. {hermes(GO, LOOK)} And."
    assert read(make(HermesReader, at_most=1), list(text)) == ("So. \n And.", [("go", "{}")], True)


@pytest.mark.parametrize("finish_reason", ["stop", "length", "abort", None])
def test_an_end_that_is_not_the_texts_own_stays_what_it_is(finish_reason: str | None) -> None:
    reader = make(HermesReader)
    reader.push(hermes(GO))
    assert reader.reason(finish_reason) == ("tool_calls" if finish_reason == "stop" else finish_reason)


def test_ids_are_openais_and_mistrals_are_mistrals() -> None:
    assert re.fullmatch("call_[0-9a-f]{24}", HermesReader.make_id())
    assert re.fullmatch("[a-zA-Z0-9]{9}", MistralReader.make_id())
    [part] = make(ForcedReader, new_id=MistralReader.make_id).push(f"[{GO}]").calls
    assert len(part.call_id or "") == 9


TEMPLATES = {
    # As models have them, cut down to what tells them apart.
    "hermes": [
        "{{- \"<tool_call>\\n{\\\"name\\\": <function-name>, \\\"arguments\\\": <args-json-object>}\\n</tool_call>\" }}",
        "{{ '<tool_call>\\n{\"name\": \"' + tool_call.name + '\", \"arguments\": ' }}",
    ],
    "llama3_json": [
        "<|start_header_id|>{{- 'Respond in the format {\"name\": function name, \"parameters\": dictionary' }}",
        "{{- '<|start_header_id|>' }}{{- '{\"name\": \"' + tool_call.name + '\", ' }}{{- '\"parameters\": ' }}",
    ],
    "mistral": ["{{- \"[TOOL_CALLS] [\" }}", "{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}"],
    None: [
        "",
        "{{ '<tool_call>\\n<function=' + name + '>\\n<parameter=' }} \"arguments\": ",
        "{{ '<tool_call>' + name + '\\n<arg_key>' }}\"arguments\":",
        "<|im_start|>{{ message['content'] }}",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_shows_its_format(name: str | None) -> None:
    assert name is None or name in FORMATS
    for template in TEMPLATES[name]:
        assert format_of(template) == name


Plant = Callable[[pytest.MonkeyPatch], None]


def forgets_its_state(patch: pytest.MonkeyPatch) -> None:
    """Each piece is looked at alone."""
    own = CallReader.push

    def push(self: CallReader, text: str) -> Any:
        told = own(self, text)
        if self._wake is not None:
            self._say_held(len(self._held))
        return told

    patch.setattr(CallReader, "push", push)


def drops_what_broke(patch: pytest.MonkeyPatch) -> None:
    own = CallReader._give_back

    def give_back(self: CallReader) -> None:
        del self._held[:-1]
        own(self)

    patch.setattr(CallReader, "_give_back", give_back)


def takes_any_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CallReader, "_offered", lambda self, name: name)


def tells_broken_calls_as_whole(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CallReader, "reason", lambda self, reason: "tool_calls" if self._num_begun else reason)


def eats_white_space(patch: pytest.MonkeyPatch) -> None:
    own = CallReader._say
    patch.setattr(CallReader, "_say", lambda self, text: own(self, text.strip()))


PLANTED: list[tuple[Plant, str]] = [
    (forgets_its_state, "a call"),
    (drops_what_broke, "no call: {}"),
    (takes_any_name, "a name of nobody"),
    (tells_broken_calls_as_whole, "arguments that break"),
    (eats_white_space, "two calls between texts"),
]


@pytest.mark.parametrize("plant, name", PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
def test_a_planted_fault_is_caught(plant: Plant, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(name)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_case(name)


def test_a_reader_that_holds_all_back_or_reads_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        own = CallReader._say_held
        patch.setattr(CallReader, "_say_held", lambda self, count: own(self, count if count > 20 else 0))
        with pytest.raises(AssertionError):
            check_held(HermesReader, "a < text that goes on", 8)

    def joined(reader: CallReader, text: str) -> None:
        own_say(reader, text)
        reader._space = ["".join(reader._space)]
        "".join(reader._space).rstrip()

    with monkeypatch.context() as patch:
        own_say = CallReader._say
        patch.setattr(CallReader, "_say", joined)
        with pytest.raises(AssertionError):
            check_white_space()

    def all_again(reader: CallReader) -> None:
        """What broke is looked at once more from its second character on, for calls inside of it."""
        held, reader._sink = "".join(reader._sink), reader._held
        reader._held.clear()
        reader._say(held[:1])
        reader._again = held[1:]

    with monkeypatch.context() as patch:
        patch.setattr(CallReader, "_give_back", all_again)
        with pytest.raises(AssertionError):
            check_work(NESTED)

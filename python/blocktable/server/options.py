"""The options of `blocktable serve`: one frozen record, and how flags, the environment and a file fill it, all alike.

Before: a shell, a unit file, a container. After: `server_process.py` reads the record. Always: an option has one name in all
three places (`--max-num-seqs`, `BLOCKTABLE_MAX_NUM_SEQS`, `max_num_seqs = …`); flags go before the environment, that before
the file, that before the defaults; a value outside its bound, or a name that does not exist, is refused with the place where
it stood; in the environment, which is not ours alone, such a name is warned of (`unknown_variables`). The engine's options are
the fields of `EngineConfig`, with its defaults and its words.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import tomllib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from .. import checks
from ..engine.config import EngineConfig
from ..errors import InvalidInputError, UnknownOptionError
from .limits import Limits
from .logs import LEVELS
from .tools.formats import FORMATS

PREFIX = "BLOCKTABLE_"
"""Of every name in the environment."""

SERVICE = ("tcp://", "udp://", "sctp://")
"""What Kubernetes writes as BLOCKTABLE_PORT into every container beside a Service of that name begins so. No option has such a
value."""

OF_A_SERVICE = re.compile(r"\w*(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
"""The names of the others that it writes there."""

CONFIG = "config"
"""The option that names the file."""

OTHER_NAMES = {
    "memory_share": ("gpu_memory_utilization",),
    "num_blocks": ("num_gpu_blocks_override",),
    "policy": ("scheduling_policy",),
}
"""vLLM's flags for options that are called otherwise here and mean the same."""

LOG_FORMATS = ("json", "plain")

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What a serving process is started with. Raises `InvalidInputError` (field, value, bound)."""

    model: str
    """Local directory, hub id, or GGUF file; `smollm2` is the small model."""
    host: str = "127.0.0.1"
    """Address for clients. Without `api_key_file` only loopback is taken."""
    port: int = 8000
    """0 = any that is free."""
    admin_host: str = "127.0.0.1"
    """Address for metrics and what an operator asks. There are no keys: keep it to yourself."""
    admin_port: int = 8001
    """0 = any that is free."""
    served_model_name: str | None = None
    """What clients call the model; None = as `model`."""
    api_key_file: str | None = None
    """Keys and their tenants; None = no keys, on loopback only."""
    tool_call_parser: str | None = None
    """How the model writes calls of tools: `hermes`, `llama3_json` or `mistral`; None = as its chat template shows."""
    enable_auto_tool_choice: bool = True
    """The model may choose whether it calls."""
    engine_restart: int = 5
    """How often in ten minutes a dead engine is started again; one death more, and the server ends. 0 = at the first."""
    drain_timeout_s: float = 30.0
    """Seconds that running requests get to finish after SIGTERM; the rest are aborted."""
    stall_s: float = 30.0
    """Seconds without a step, with work at hand, from which on `/healthz/progress` is 503."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    log_format: str = "json"
    """`json` or `plain`."""
    log_requests: bool = True
    """A line for each request that ended."""
    log_prompts: bool = False
    """Prompts stand in those lines, as token ids."""
    otlp_traces_endpoint: str | None = None
    """Where traces of requests go, by OTLP over HTTP (http://collector:4318/v1/traces); None = there are none."""
    limits: Limits = field(default_factory=Limits)
    """Of one client; its fields are options too."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    """Those of the engine's options that were given."""

    def __post_init__(self) -> None:
        for name in ("model", "host", "admin_host"):
            checks.text(name, getattr(self, name))
        for name in ("served_model_name", "api_key_file", "otlp_traces_endpoint"):
            if getattr(self, name) is not None:
                checks.text(name, getattr(self, name))
        for name in ("port", "admin_port"):
            checks.whole(name, getattr(self, name), 0, 65535)
        checks.whole("engine_restart", self.engine_restart, 0, 1000)
        checks.seconds("drain_timeout_s", self.drain_timeout_s, low=0.0)
        checks.seconds("stall_s", self.stall_s, low=0.1)
        checks.one_of("log_level", self.log_level, LEVELS)
        checks.one_of("log_format", self.log_format, LOG_FORMATS)
        if self.tool_call_parser is not None:
            checks.one_of("tool_call_parser", self.tool_call_parser, tuple(FORMATS))
        for name in ("enable_auto_tool_choice", "log_requests", "log_prompts"):
            checks.flag(name, getattr(self, name))


@dataclass(frozen=True, slots=True)
class Option:
    """One of them, wherever it stands."""

    name: str
    kind: type
    """Of a value that is not None; `Mapping` is written as JSON where it has to be text."""
    default: Any
    help: str
    of_engine: bool

    @property
    def other_names(self) -> tuple[str, ...]:
        """vLLM's, where it calls the same otherwise."""
        return OTHER_NAMES.get(self.name, ())

    @property
    def flags(self) -> list[str]:
        """With vLLM's."""
        return [f"--{name.replace('_', '-')}" for name in (self.name, *self.other_names)]

    @property
    def variable(self) -> str:
        """In the environment."""
        return PREFIX + self.name.upper()

    def read(self, text: str) -> Any:
        """The value that a text means. Raises `ValueError`."""
        if self.kind is bool:
            return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]
        if self.kind is int and self.name.endswith("_bytes"):
            return int(text[:-1]) * _UNITS[text[-1].upper()] if text[-1:].upper() in _UNITS else int(text)
        if self.kind is Mapping:
            value = json.loads(text)
            if not isinstance(value, dict):
                raise ValueError("no JSON object")
            return value
        return self.kind(text)

    @property
    def shape(self) -> str:
        """What its text looks like."""
        shapes: dict[type, str] = {int: "a whole number", float: "a number", bool: "true or false", Mapping: "a JSON object"}
        return shapes.get(self.kind, "a text")


@cache
def all_options() -> Mapping[str, Option]:
    """Every option but `model`, by name."""
    own = [option for option in _options_of(ServeOptions, of_engine=False) if not option.name.startswith(("model", "engine_o"))]
    own += _options_of(Limits, of_engine=False)
    engine = [option for option in _options_of(EngineConfig, of_engine=True) if option.name != "model"]
    return {option.name: option for option in [*own, *engine] if option.name not in ("engine", "limits")}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give `parser` every option. What is not given does not stand in the namespace."""
    parser.add_argument("model", nargs="?", default=argparse.SUPPRESS, help=_words(ServeOptions)["model"])
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="a TOML file with any of these options")
    groups = {is_engine: parser.add_argument_group(title) for is_engine, title in ((False, "server"), (True, "engine"))}
    for option in all_options().values():
        group = groups[option.of_engine]
        text = option.help.replace("%", "%%")
        if option.default is not None:
            shown = str(option.default).lower() if option.kind is bool else option.default
            text = f"{text} (default: {shown})"
        if option.kind is bool:
            group.add_argument(
                *option.flags, dest=option.name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text
            )
            continue
        metavar = {int: "N", float: "X", Mapping: "JSON"}.get(option.kind, "TEXT")
        group.add_argument(
            *option.flags, dest=option.name, type=_argument(option), metavar=metavar, default=argparse.SUPPRESS, help=text
        )


def read_options(given: Mapping[str, Any], environment: Mapping[str, str]) -> ServeOptions:
    """The record. `given`: what stands in the namespace of `add_options`' parser. Raises `InvalidInputError`."""
    known = all_options()
    config = given.get(CONFIG, environment.get(PREFIX + "CONFIG"))
    values = {} if config is None else _from_file(config)
    values |= _from_environment(environment)
    values |= {name: value for name, value in given.items() if name in known or name == "model"}
    if "model" not in values:
        raise InvalidInputError("model", None, "say which: blocktable serve MODEL")
    engine = {name: value for name, value in values.items() if name in known and known[name].of_engine}
    limits = {one.name: values[one.name] for one in fields(Limits) if one.name in values}
    own = {name: value for name, value in values.items() if name not in engine and name not in limits}
    return ServeOptions(**own, limits=Limits(**limits), engine=EngineConfig.from_options(engine), engine_options=engine)


def unknown_variables(environment: Mapping[str, str]) -> Iterator[str]:
    """A line about each name in the environment that begins as ours do and names no option, with the nearest one."""
    options = {other.upper(): one.variable for one in all_options().values() for other in (one.name, *one.other_names)}
    options |= {name.upper(): PREFIX + name.upper() for name in ("model", CONFIG)}
    for name, value in sorted(environment.items()):
        if not name.startswith(PREFIX) or name in options.values():
            continue
        if value.startswith(SERVICE) or OF_A_SERVICE.fullmatch(name):
            continue
        near = get_close_matches(name.removeprefix(PREFIX), options, n=1)
        yield f"{name} in the environment is no option" + (f"; did you mean {options[near[0]]}?" if near else "")


def _from_file(name: str) -> dict[str, Any]:
    try:
        table = tomllib.loads(Path(name).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidInputError(CONFIG, name, f"cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(CONFIG, name, f"is no TOML: {error}") from None
    known = {**dict.fromkeys(all_options()), "model": None}
    ours = {other: name for name, others in OTHER_NAMES.items() for other in others}
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for key, value in table.items():
        option = key.replace("-", "_")
        option = ours.get(option, option)
        if option in keys:
            raise InvalidInputError(key, value, f"stands in {name} twice, as {keys[option]} too")
        keys[option] = key
        if option not in known:
            error_found = UnknownOptionError(key, value, known)
            error_found.add_note(f"in {name}")
            raise error_found
        values[option] = float(value) if _is_float(option) and isinstance(value, int) else value
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if PREFIX + "MODEL" in environment:
        values["model"] = environment[PREFIX + "MODEL"]
    for option in all_options().values():
        text = environment.get(option.variable)
        if text is not None and not text.startswith(SERVICE):
            try:
                values[option.name] = option.read(text)
            except (ValueError, KeyError):
                raise InvalidInputError(option.variable, text, f"must be {option.shape}") from None
    return values


def _is_float(name: str) -> bool:
    option = all_options().get(name)
    return option is not None and option.kind is float


def _argument(option: Option) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return option.read(text)
        except (ValueError, KeyError):
            raise argparse.ArgumentTypeError(f"{text!r} is not {option.shape}") from None

    return read


def _options_of(record: type[ServeOptions | Limits | EngineConfig], *, of_engine: bool) -> list[Option]:
    hints, words = typing.get_type_hints(record), _words(record)
    options = []
    for one in fields(record):
        default = None if one.default is MISSING else one.default
        options.append(Option(one.name, _kind(hints[one.name]), default, words.get(one.name, ""), of_engine))
    return options


def _kind(hint: Any) -> type:
    """The type of a value that is not None. A record of its own is written as a mapping."""
    if isinstance(hint, types.UnionType):
        hint = next(one for one in typing.get_args(hint) if one is not type(None))
    kind = typing.get_origin(hint) or hint
    return kind if kind in (int, float, bool, str) else typing.cast(type, Mapping)


def _words(record: type) -> Mapping[str, str]:
    """What stands under each field of a record, in one line: its help."""
    [tree] = ast.parse(inspect.getsource(record)).body
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    words = {}
    for one, below in pairwise(body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and isinstance(below, ast.Expr):
            if isinstance(below.value, ast.Constant):
                words[one.target.id] = " ".join(str(below.value.value).replace("`", "").split())
    return words

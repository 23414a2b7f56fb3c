"""Promise: an option means the same as a flag, in the environment and in the file; a wrong one is refused by its name."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from blocktable.engine.config import EngineConfig
from blocktable.errors import InvalidInputError, UnknownOptionError
from blocktable.server.options import ServeOptions, add_options, all_options, read_options, unknown_variables


def given(*flags: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    add_options(parser)
    return vars(parser.parse_args(flags))


CASES: dict[str, tuple[str, str, Any]] = {
    # option: its text, how TOML writes it, its value
    "port": ("9000", "9000", 9000),
    "host": ("::1", '"::1"', "::1"),
    "stall_s": ("2.5", "2.5", 2.5),
    "drain_timeout_s": ("7", "7", 7.0),
    "log_requests": ("false", "false", False),
    "log_format": ("plain", '"plain"', "plain"),
    "tool_call_parser": ("hermes", '"hermes"', "hermes"),
    "enable_auto_tool_choice": ("false", "false", False),
    "max_num_seqs": ("64", "64", 64),
    "memory_share": ("0.25", "0.25", 0.25),
    "kv_cache_memory_bytes": ("2G", "2147483648", 2**31),
    "policy": ("fair", '"fair"', "fair"),
    "max_body_bytes": ("1M", "1048576", 2**20),
    "max_request_s": ("60", "60", 60.0),
    "enable_prefix_caching": ("0", "false", False),
    "tenants": ('{"a": {"weight": 2}}', "{a = {weight = 2}}", {"a": {"weight": 2}}),
}


def value_of(options: ServeOptions, name: str) -> Any:
    if all_options()[name].of_engine:
        return getattr(options.engine, name)
    return getattr(options.limits if hasattr(options.limits, name) else options, name)


@pytest.mark.parametrize("name", CASES)
def test_an_option_means_the_same_wherever_it_stands(name: str, tmp_path: Path) -> None:
    text, toml, value = CASES[name]
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, bool):
        flags = [flag if value else flag.replace("--", "--no-", 1)]
    else:
        flags = [flag, text]
    file = tmp_path / "serve.toml"
    file.write_text(f'model = "m"\n{name.replace("_", "-")} = {toml}\n')
    read = [
        read_options(given("m", *flags), {}),
        read_options(given("m"), {f"BLOCKTABLE_{name.upper()}": text}),
        read_options(given("--config", str(file)), {}),
        read_options({}, {"BLOCKTABLE_CONFIG": str(file)}),
    ]
    assert [value_of(options, name) for options in read] == [value] * 4
    assert value_of(read_options(given("m"), {}), name) != value


def test_flags_go_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('model = "file"\nport = 1\nadmin_port = 1\nmax_num_seqs = 1\n')
    environment = {"BLOCKTABLE_PORT": "2", "BLOCKTABLE_ADMIN_PORT": "2", "BLOCKTABLE_MODEL": "environment"}
    options = read_options(given("flag", "--port", "3", "--config", str(file)), environment)
    assert (options.model, options.port, options.admin_port, options.engine.max_num_seqs) == ("flag", 3, 2, 1)
    assert read_options(given("--config", str(file)), environment).model == "environment"


def test_what_kubernetes_writes_beside_a_service_of_our_name_is_no_option() -> None:
    environment = {"BLOCKTABLE_PORT": "tcp://10.0.0.7:8000", "BLOCKTABLE_SERVICE_HOST": "10.0.0.7"}
    assert read_options(given("m"), environment).port == 8000
    with pytest.raises(InvalidInputError, match="BLOCKTABLE_PORT"):
        read_options(given("m"), {"BLOCKTABLE_PORT": "10.0.0.7:8000"})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("MAX_NUM_SEQ", "; did you mean BLOCKTABLE_MAX_NUM_SEQS?"),
        ("OTLP_TRACE_ENDPOINT", "; did you mean BLOCKTABLE_OTLP_TRACES_ENDPOINT?"),
        ("GPU_MEMORY_UTILIZATION", "; did you mean BLOCKTABLE_MEMORY_SHARE?"),
        ("CONFG", "; did you mean BLOCKTABLE_CONFIG?"),
        ("XYZZY", ""),
    ],
)
def test_a_name_in_the_environment_that_is_no_option_is_told_with_the_nearest(name: str, nearest: str) -> None:
    variable = f"BLOCKTABLE_{name}"
    assert list(unknown_variables({variable: "http://64"})) == [f"{variable} in the environment is no option{nearest}"]


def test_options_and_names_of_others_in_the_environment_are_told_nobody() -> None:
    options = [option.variable for option in all_options().values()] + ["BLOCKTABLE_MODEL", "BLOCKTABLE_CONFIG"]
    service = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR", "PORT_53_UDP_PROTO"]
    names = [f"BLOCKTABLE_{name}" for name in (*service, "ADMIN_SERVICE_HOST", "ADMIN_PORT_8001_TCP_PORT")]
    assert not list(unknown_variables(dict.fromkeys([*options, *names, "PATH"], "1")))
    assert not list(unknown_variables({"BLOCKTABLE_DNS_PORT": "udp://10.0.0.7:53"}))


@pytest.mark.parametrize(
    ("first", "second"), [("num_blocks", "num_gpu_blocks_override"), ("max_num_seqs", "max-num-seqs")], ids=["vllm", "dashes"]
)
def test_an_option_that_stands_in_the_file_by_two_names_is_refused(first: str, second: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(f"{first} = 100\n{second} = 50\n")
    with pytest.raises(InvalidInputError, match=f"{second}=50: stands in .*serve.toml twice, as {first} too"):
        read_options(given("m", "--config", str(file)), {})


@pytest.mark.parametrize(
    ("flag", "name", "text", "value"),
    [
        ("--gpu-memory-utilization", "memory_share", "0.5", 0.5),
        ("--num-gpu-blocks-override", "num_blocks", "100", 100),
        ("--scheduling-policy", "policy", "priority", "priority"),
        ("--max-model-len", "max_model_len", "100", 100),
    ],
)
def test_flags_of_vllm_that_mean_the_same_are_taken(flag: str, name: str, text: str, value: Any) -> None:
    assert value_of(read_options(given("m", flag, text), {}), name) == value


def test_every_option_of_the_engine_is_an_option_here() -> None:
    assert {one.name for one in fields(EngineConfig)} - {"model"} == {
        name for name, option in all_options().items() if option.of_engine
    }


def test_every_option_has_its_help_and_its_default() -> None:
    for name, option in all_options().items():
        assert option.help.endswith((".", ")")) or option.help, name
    defaults = read_options({"model": "m"}, {})
    assert defaults.engine == EngineConfig()
    assert all(value_of(defaults, name) == option.default for name, option in all_options().items())


REFUSED: list[tuple[list[str], dict[str, str], str, str]] = [
    ([], {}, "", "say which"),
    (["m", "--port", "70000"], {}, "", "port=70000"),
    (["m"], {"BLOCKTABLE_PORT": "many"}, "", "BLOCKTABLE_PORT='many': must be a whole number"),
    (["m"], {"BLOCKTABLE_LOG_REQUESTS": "perhaps"}, "", "must be true or false"),
    (["m"], {"BLOCKTABLE_TENANTS": "[1]"}, "", "must be a JSON object"),
    (["m", "--stall-s", "nan"], {}, "", "stall_s"),
    (["m", "--log-level", "loud"], {}, "", "log_level"),
    (["m", "--policy", "random"], {}, "", "policy"),
    (["m", "--tool-call-parser", "pythonic"], {}, "", "must be one of hermes, llama3_json, mistral"),
    (["m"], {}, "max_num_seq = 3", "max_num_seqs"),
    (["m"], {}, "max_num_seqs = true", "max_num_seqs=True"),
    (["m"], {}, "port = ", "is no TOML"),
    (["m"], {}, 'log_prompts = "yes"', "log_prompts"),
]


@pytest.mark.parametrize(("flags", "environment", "toml", "match"), REFUSED)
def test_what_is_wrong_is_refused_by_its_name(
    flags: list[str], environment: dict[str, str], toml: str, match: str, tmp_path: Path
) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(toml)
    with pytest.raises(InvalidInputError, match=match):
        read_options(given(*flags, "--config", str(file)), environment)


def test_a_mark_of_the_order_of_bytes_is_no_part_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("\ufeffport = 9000\n", encoding="utf-8")
    assert read_options(given("m", "--config", str(file)), {}).port == 9000


def test_a_wrong_name_in_the_file_names_the_file_and_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("admin-prt = 3\n")
    with pytest.raises(UnknownOptionError, match="admin_port") as caught:
        read_options(given("m", "--config", str(file)), {})
    assert str(file) in caught.value.__notes__[0]
    with pytest.raises(InvalidInputError, match="cannot be read"):
        read_options(given("m", "--config", str(tmp_path / "none")), {})

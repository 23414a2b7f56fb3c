"""What the documents promise exists: commands, targets, files, and the ladder's rungs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/async.md",
    "docs/embedding.md",
    "docs/operating.md",
    "docs/reasons.md",
    "docs/scheduler.md",
    "docs/server.md",
    "docs/testing.md",
]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z]+):", MAKEFILE, re.MULTILINE))


def read(name: str) -> str:
    return (ROOT / name).read_text()


def code(text: str) -> str:
    """Fenced blocks and code in a line."""
    return "\n".join(re.findall(r"```.*?\n(.*?)```", text, re.DOTALL) + re.findall(r"(?<!`)`([^`\n]+)`(?!`)", text))


def links(text: str) -> list[str]:
    """Targets of links, without those that leave the tree and without code."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """Names of the headings as a browser of the repository makes them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document):
    for target in links(read(document)):
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), f"{document}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text()), f"{document}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_make_target_that_a_document_names_exists(document):
    named = set(re.findall(r"\bmake ([a-z]+)\b", code(read(document))))
    assert named <= TARGETS, named - TARGETS


def test_the_readme_names_the_two_commands_of_a_newcomer():
    named = re.findall(r"\bmake ([a-z]+)\b", code(read("README.md")))
    assert {"run", "test"} <= set(named)


def test_every_subcommand_that_the_readme_names_exists():
    named = set(re.findall(r"\bblocktable ([a-z]+)\b", code(read("README.md")))) - {"import"}
    told = subprocess.run([sys.executable, "-m", "blocktable", "--help"], capture_output=True, text=True, check=True).stdout
    for name in named:
        assert re.search(rf"\b{name}\b", told), f"README names `blocktable {name}`"


def test_every_file_that_the_readme_names_exists():
    text = read("README.md")
    for path in set(re.findall(r"`((?:rust|python|kernels|tests)/[\w./-]+)`", text)):
        assert (ROOT / path).exists(), path


def test_help_tells_every_target_a_person_may_call():
    told = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert {line.split()[1] for line in told.splitlines() if line.strip().startswith("make ")} == TARGETS
    assert all(len(line.split()) > 3 for line in told.splitlines() if line.strip().startswith("make "))


def test_a_planted_broken_link_is_found():
    """The checks above can fail."""
    assert links("see [this](missing.md#part) and [that](https://example.org) `[x](y)`")[0] == "missing.md#part"
    assert re.findall(r"\bmake ([a-z]+)\b", code("run `make nonsense` now")) == ["nonsense"]


def test_the_changelog_tells_of_this_version():
    from blocktable import __version__

    assert f"## {__version__}" in read("CHANGELOG.md") or f"## [{__version__}]" in read("CHANGELOG.md")

"""The stub says what the compiled module has: the same names, the same parameters, the same defaults."""

import ast
import inspect
from pathlib import Path

import pytest

import blocktable
from blocktable import _core

STUB = ast.parse((Path(blocktable.__file__).parent / "_core.pyi").read_text())
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
ASSIGNED = {node.target.id for node in STUB.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
CONSTANTS = {name for name in ASSIGNED if not name.startswith("_") or name == "__version__"}
METHODS = {
    (name, method.name): method for name, node in CLASSES.items() for method in node.body if isinstance(method, ast.FunctionDef)
}
BY_THE_LANGUAGE = {"__module__", "__doc__", "__new__"}


def is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(decorator, ast.Name) and decorator.id == "property" for decorator in node.decorator_list)


def parameters(node: ast.FunctionDef) -> list[tuple[str, str, object]]:
    """(name, kind, default) of each parameter but the first of a method."""
    every = [*node.args.posonlyargs, *node.args.args]
    given = [ast.literal_eval(default) for default in node.args.defaults]
    defaults = [inspect.Parameter.empty] * (len(every) - len(given)) + given
    found = [(arg.arg, "plain", default) for arg, default in zip(every, defaults)]
    for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults):
        found.append((arg.arg, "keyword", inspect.Parameter.empty if default is None else ast.literal_eval(default)))
    return [parameter for parameter in found if parameter[0] not in ("self", "cls")]


def real_parameters(function: object) -> list[tuple[str, str, object]]:
    found = []
    for name, parameter in inspect.signature(function).parameters.items():  # type: ignore[arg-type]
        if name not in ("self", "cls"):
            kind = "keyword" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else "plain"
            found.append((name, kind, parameter.default))
    return found


def test_the_stub_names_what_the_module_has():
    has = {name for name in vars(_core) if not name.startswith("_") or name == "__version__"}
    assert has == set(FUNCTIONS) | set(CLASSES) | CONSTANTS


@pytest.mark.parametrize("name", CLASSES)
def test_the_stub_names_what_the_class_has(name):
    has = {member for member in vars(getattr(_core, name)) if not member.startswith("_")}
    assert has == {method for owner, method in METHODS if owner == name and not method.startswith("_")}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_takes_what_the_stub_says(name):
    assert real_parameters(getattr(_core, name)) == parameters(FUNCTIONS[name])


@pytest.mark.parametrize("name, method", [key for key, node in METHODS.items() if not is_property(node)])
def test_a_method_takes_what_the_stub_says(name, method):
    owner = getattr(_core, name)
    assert real_parameters(owner if method == "__new__" else getattr(owner, method)) == parameters(METHODS[name, method])


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_is_final_as_the_stub_says(name):
    with pytest.raises(TypeError):
        type("Derived", (getattr(_core, name),), {})


def test_the_version_is_the_distributions():
    from importlib.metadata import version

    assert _core.__version__ == version("blocktable")

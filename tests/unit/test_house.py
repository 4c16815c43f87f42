"""The rules of the house: who imports whom, what is never imported, how long things may be."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "talkoot"
FILES = sorted(SOURCE.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# Each room may import from rooms of a lower storey, and from itself.
STOREYS = {
    "core": 0,
    "world": 1,
    **dict.fromkeys(("model", "data", "plan"), 2),
    "run": 3,
    **dict.fromkeys(("train", "tune", "blend", "audit", "pay"), 4),
    **dict.fromkeys(("serve", "bench", "cli", "recipes"), 5),
}
ROLES = {"train", "tune", "blend", "audit", "pay"}

PICKLERS = {"pickle", "cPickle", "dill", "shelve", "marshal", "cloudpickle", "joblib", "_pickle"}

# Functions that may catch everything, because whatever it is must not die with what they supervise.
SUPERVISORS = {"world/base.py:run_program", "cli/__init__.py:main"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def room(path: Path) -> str:
    """The folder below talkoot, or '' for the package itself."""
    parts = path.relative_to(SOURCE).parts
    return parts[0].removesuffix(".py") if len(parts) > 1 or parts[0] != "__init__.py" else ""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every imported module with its line, wherever in the file it stands."""
    package = ("talkoot", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif called(node) in ("import_module", "__import__") and node.args:
            yield node.lineno, str(getattr(node.args[0], "value", ""))


def called(node: ast.AST) -> str:
    """The last word of what a call calls; '' for anything else."""
    return getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_there_is_a_house():
    assert {"core", "world", "train"} <= {room(path) for path in FILES}
    assert len(FILES) > 30


def test_every_room_is_known():
    assert {room(path) for path in FILES} - {""} - {"__main__"} <= set(STOREYS)


def test_imports_point_one_way():
    wrong = []
    for path in FILES:
        here = room(path)
        if here not in STOREYS:
            continue
        for line, module in imports(path):
            parts = module.split(".")
            there = parts[1] if parts[0] == "talkoot" and len(parts) > 1 else None
            if there not in STOREYS or there == here:
                continue
            higher = STOREYS[there] > STOREYS[here]
            roles = {here, there} <= ROLES
            if higher or roles:
                wrong.append(f"{place(path, line)}: {here} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_core_knows_no_tensors():
    heavy = {"torch", "numpy", "transformers", "zmq", "safetensors"}
    wrong = [
        f"{place(path, line)}: {module}"
        for path in FILES
        for line, module in imports(path)
        if room(path) == "core" and module.split(".")[0] in heavy
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("modules", ["talkoot.core", "talkoot.world.real.host", "talkoot.world.sim.simulation"])
def test_light_imports(modules):
    core = ["codec", "errors", "fold", "ids", "keys", "log", "receipt", "registry"]
    names = ", ".join([modules, *(f"talkoot.core.{name}" for name in core)])
    script = f"import {names}, sys; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert done.stdout.strip() == "[]"


def test_nothing_is_pickled():
    wrong = [
        f"{place(path, line)}: {module}"
        for path in FILES
        for line, module in imports(path)
        if module.split(".")[0] in PICKLERS or module.startswith(("torch.save", "torch.load"))
    ]
    for path in FILES:
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Attribute | ast.Call):
                continue
            if isinstance(node, ast.Attribute):
                owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
                if (owner, node.attr) in {("torch", "load"), ("torch", "save"), ("np", "load"), ("numpy", "load")}:
                    wrong.append(f"{place(path, node.lineno)}: {owner}.{node.attr}")
            elif any(word.arg == "allow_pickle" for word in node.keywords):
                wrong.append(f"{place(path, node.lineno)}: allow_pickle")
    assert not wrong, "\n".join(wrong)


def test_files_and_functions_are_short():
    long = []
    for path in FILES:
        lines = len(path.read_text().splitlines())
        if lines >= 400:
            long.append(f"{place(path, lines)}: a file of {lines} lines")
        for node in functions(path):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= 60:
                long.append(f"{place(path, node.lineno)}: {node.name} has {length} lines")
    assert not long, "\n".join(long)


def catches_everything(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {"Exception", "BaseException"}
    return any(kind is None or getattr(kind, "id", getattr(kind, "attr", "")) in names for kind in kinds)


def test_nothing_is_swallowed():
    allowed, wrong = set(), []
    for path in FILES:
        key = path.relative_to(SOURCE).as_posix()
        supervised = set()
        for node in functions(path):
            if f"{key}:{node.name}" in SUPERVISORS:
                allowed.add(f"{key}:{node.name}")
                supervised |= {id(inner) for inner in ast.walk(node)}
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ExceptHandler) and catches_everything(node) and id(node) not in supervised:
                wrong.append(f"{place(path, node.lineno)}: catches everything; name what can happen")
            suppressed = {getattr(kind, "id", "") for kind in node.args} if called(node) == "suppress" else set()
            if suppressed & {"Exception", "BaseException"}:
                wrong.append(f"{place(path, node.lineno)}: suppresses everything")
    assert not wrong, "\n".join(wrong)
    assert allowed == SUPERVISORS  # the list names nothing that is gone


def test_tests_do_not_sleep():
    wrong = []
    for path in TESTS:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.sleep", "sleep"):
                wrong.append(place(path, node.lineno))
    assert not wrong, "\n".join(wrong)


def test_inputs_are_not_checked_by_assertions():
    wrong = [
        place(path, node.lineno) for path in FILES for node in ast.walk(tree(path)) if isinstance(node, ast.Assert)
    ]
    assert not wrong, "\n".join(wrong)


def project_texts() -> Iterator[Path]:
    for folder in ("src", "tests", "docs"):
        for path in (ROOT / folder).rglob("*"):
            if (
                path.suffix in {".py", ".md", ".toml", ".html", ".js", ".css", ".txt"}
                and "__pycache__" not in path.parts
            ):
                yield path
    yield from (path for path in ROOT.iterdir() if path.is_file() and not path.name.startswith("."))


def test_no_text_names_a_path_of_some_machine():
    machine = re.compile(r"(?<![\w.~/-])/(work|root|home|Users)/[\w.-]")
    wrong = []
    for path in project_texts():
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if machine.search(line):
                wrong.append(f"{place(path, number)}: {line.strip()[:80]}")
    assert not wrong, "\n".join(wrong)


def undocumented(path: Path) -> Iterator[str]:
    module = tree(path)
    if module.body and not ast.get_docstring(module):
        yield f"{place(path, 1)}: the module"
    pending: list[ast.AST] = [module]
    while pending:
        for node in ast.iter_child_nodes(pending.pop()):
            named = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if not named or node.name.startswith("_"):
                continue
            if isinstance(node, ast.ClassDef):
                pending.append(node)
            if not ast.get_docstring(node) and not inherited(path, node):
                yield f"{place(path, node.lineno)}: {node.name}"


@cache
def documented_methods() -> frozenset[str]:
    """Methods that a protocol or base class documents; implementations need not repeat it."""
    return frozenset(
        member.name
        for path in FILES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        for member in node.body
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(member)
    ) | {"select", "register", "unregister", "get_map", "time", "format", "emit"}  # the standard library's


@cache
def derived_classes(path: Path) -> frozenset[int]:
    """Lines that belong to classes with a base, or that implement a protocol by shape."""
    return frozenset(
        line
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ClassDef)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    )


def inherited(path: Path, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    is_method = not isinstance(node, ast.ClassDef) and node.lineno in derived_classes(path)
    return is_method and node.name in documented_methods()


def test_everything_public_is_documented():
    wrong = [text for path in FILES for text in undocumented(path)]
    assert not wrong, "\n".join(wrong)

"""The arrows point down: no room imports from a floor above its own, and nothing from `engine` down knows Ray."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import cast_ray

PACKAGE = Path(cast_ray.__file__).parent
FLOORS = [
    {"cli"},
    {"commands"},
    {"batch", "serve", "training"},
    {"pool"},
    {"stats"},
    {"engine"},
    {"calibration"},
    {"models", "drafters"},
    {"trees", "width", "sampling"},
    {"request", "spellings", "fields", "config", "settings", "errors", "transfer"},
]
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}


def imports() -> Iterator[tuple[str, str, str]]:
    """(room, file, imported module) of every import in the package, at any depth of the file."""
    for file in sorted(PACKAGE.rglob("*.py")):
        relative = file.relative_to(PACKAGE)
        room = relative.parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield room, str(relative), node.module
            elif isinstance(node, ast.Import):
                yield from ((room, str(relative), alias.name) for alias in node.names)


def test_no_room_imports_from_a_floor_above() -> None:
    seen = 0
    for room, file, module in imports():
        if room == "__init__" or not module.startswith("cast_ray."):
            continue
        seen += 1
        other = module.split(".")[1]
        assert other in FLOOR_OF, f"{file} imports {module}, a room on no floor"
        assert FLOOR_OF[other] >= FLOOR_OF[room], f"{file} imports {module} from a floor above"
    assert seen > 100


def test_nothing_from_the_engine_down_knows_ray() -> None:
    for room, file, module in imports():
        if FLOOR_OF.get(room, 0) >= FLOOR_OF["engine"]:
            assert module.split(".")[0] != "ray", f"{file} imports {module}"


def test_there_is_no_room_without_a_floor() -> None:
    rooms = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert rooms - {"__init__", "__pycache__", "data"} == set(FLOOR_OF)

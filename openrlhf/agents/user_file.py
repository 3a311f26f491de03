"""Imports the Python files that users name, and says in one line what is wrong with them."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType


class UserFileError(Exception):
    """The file cannot be used; the message is one sentence that names it."""


def import_file(path: Path, name: str) -> ModuleType:
    """Imports ``path`` as the module ``name``.

    Raises: UserFileError, where there is no such file or importing it fails, whatever it raises.
    """
    if not path.is_file():
        raise UserFileError(f"{path} is not a file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserFileError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        raise UserFileError(f"{path} cannot be imported: {describe(error, path)}") from error
    return module


def describe(error: BaseException, path: Path) -> str:
    """One line: the error, where it was raised, and the last line of the user's file on the way there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == path]
    places = own[-1:] + [frame for frame in frames[-1:] if own and frame is not own[-1]]
    trail = ", then ".join(f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in places)
    return f"{type(error).__name__}: {error}" + (f" (at {trail})" if trail else "")

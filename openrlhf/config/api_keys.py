"""Keys of reward servers, which stand in files or in the environment and never on a command line."""

from __future__ import annotations

import os
from pathlib import Path

from openrlhf.config.errors import ConfigError


def key_from_file(flag: str, file: str) -> str:
    """Reads a key.

    Args:
        flag: with its dashes, for errors.

    Raises: ConfigError where the file cannot be read or holds no key.
    """
    try:
        return _checked(Path(file).read_text(encoding="utf-8"), f"{flag} {file}")
    except OSError as error:
        raise ConfigError(f"{flag} {file}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{flag} {file}: is no text.") from None


def key_from_environment(flag: str, variable: str) -> str:
    """Returns: the key in an environment variable. Raises: ConfigError where it holds none."""
    return _checked(os.environ.get(variable, ""), f"{flag} {variable}")


def _checked(text: str, where: str) -> str:
    key = text.strip()
    # As a header it has to be one visible word.
    if not key or not all("!" <= character <= "~" for character in key):
        found = "nothing" if not key else "blanks or characters outside of ASCII"
        raise ConfigError(f"{where} must hold a key of visible ASCII characters, found {found}.")
    return key


def server_key(file: str | None, variable: str | None) -> str | None:
    """The key that clients of ``serve_rm`` have to send.

    Args:
        file: ``--api_key_file``.
        variable: ``--api_key_env``.

    Returns: None where neither is given.

    Raises: ConfigError where both are, or what they name holds no key.
    """
    if file is not None and variable is not None:
        raise ConfigError("--api_key_file and --api_key_env both name a key; keep one.")
    if file is not None:
        return key_from_file("--api_key_file", file)
    return None if variable is None else key_from_environment("--api_key_env", variable)


def client_key(variable: str | None) -> str | None:
    """Returns: the key that RL sends to reward servers, from the variable of ``--reward.api_key_env``.

    Raises: ConfigError where the variable holds none.
    """
    return None if variable is None else key_from_environment("--reward.api_key_env", variable)

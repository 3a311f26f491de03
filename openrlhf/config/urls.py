"""Addresses of reward servers."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from openrlhf.config.errors import ConfigError

_FLAG = "--reward.remote_url"


def parse_urls(remote_url: str | Sequence[str]) -> list[str]:
    """The addresses of ``--reward.remote_url``: a list, or one text with commas between them.

    Raises: ConfigError, naming the address that is none.
    """
    given = remote_url.split(",") if isinstance(remote_url, str) else list(remote_url)
    urls = [url.strip() for url in given if url.strip()]
    if not urls:
        raise ConfigError(f"{_FLAG} is empty: give a Python file with reward_func, or addresses of reward servers")
    for url in urls:
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            raise ConfigError(f"{_FLAG}: {url!r} is no address of a reward server, such as http://host:5000/get_reward")
    return urls

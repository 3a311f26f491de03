"""Which versions of the packages that training stands on will do; asked of their metadata, without importing them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from openrlhf.config.errors import ConfigError

REQUIRED = {"torch": ">=2.11", "transformers": ">=5.16.1,<5.20", "deepspeed": "==0.19.8"}
"""By distribution, as pyproject.toml has it."""

REQUIRED_FOR_RL = {"ray": ">=2.55,<2.61"}


def check_versions(required: dict[str, str]) -> None:
    """Raises ConfigError for the first package that is missing or in a version that is not known to work.

    Args:
        required: specifiers by distribution.
    """
    from packaging.specifiers import SpecifierSet

    for package, wanted in required.items():
        remedy = f"pip install '{package}{wanted}'"
        try:
            installed = version(package)
        except PackageNotFoundError:
            raise ConfigError(f"{package} is not installed, and training needs it; {remedy}.") from None
        if not SpecifierSet(wanted).contains(installed, prereleases=True):
            raise ConfigError(f"{package} {installed} is installed, and this release works with {wanted}; {remedy}.")

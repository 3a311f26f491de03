"""Packages in versions that are not known to work are refused before anything starts."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from openrlhf.config import ConfigError, versions
from openrlhf.config.versions import REQUIRED, REQUIRED_FOR_RL, check_versions

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def install(monkeypatch: pytest.MonkeyPatch, **installed: str) -> None:
    def version(package: str) -> str:
        if package not in installed:
            raise versions.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(versions, "version", version)


def test_what_is_asked_for_is_what_the_project_declares() -> None:
    declared = [Requirement(line) for line in tomllib.loads(PROJECT.read_text())["project"]["dependencies"]]
    found = {requirement.name: requirement.specifier for requirement in declared}
    for package, wanted in (REQUIRED | REQUIRED_FOR_RL).items():
        assert found[package] == SpecifierSet(wanted), package


def test_this_environment_will_do() -> None:
    check_versions(REQUIRED | REQUIRED_FOR_RL)


@pytest.mark.parametrize("number", ["2.11.0+cu130", "2.13.0", "2.13.0+cpu", "3.0.0rc1"])
def test_builds_for_a_device_and_candidates_count_as_their_version(
    monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    install(monkeypatch, torch=number)
    check_versions({"torch": REQUIRED["torch"]})


@pytest.mark.parametrize(
    ("package", "number"), [("torch", "2.10.1+cu130"), ("transformers", "5.20.0"), ("deepspeed", "0.19.5")]
)
def test_a_version_that_does_not_work_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, package: str, number: str
) -> None:
    install(monkeypatch, **{package: number})
    with pytest.raises(ConfigError) as caught:
        check_versions({package: REQUIRED[package]})
    said = str(caught.value)
    assert said.startswith(f"{package} {number} is installed") and f"pip install '{package}{REQUIRED[package]}'" in said


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    with pytest.raises(ConfigError, match="ray is not installed, and training needs it; pip install 'ray"):
        check_versions(REQUIRED_FOR_RL)

"""Environments made by name; one that cannot be made fails its episodes, and nothing else."""

from collections.abc import Mapping

from .environment import Action, Environment, EnvironmentFactory, Outcome


class Unavailable:
    """Stands in for an environment that cannot be made: every reset raises what its making raised."""

    version = ""

    def __init__(self, name: str, error: Exception) -> None:
        self.name, self._error = name, error

    async def reset(self, payload: Mapping[str, str], seed: int) -> Outcome:
        raise self._error

    async def step(self, action: Action) -> Outcome:
        raise self._error

    async def close(self) -> None:
        """Nothing to release."""


def make_environment(factories: Mapping[str, EnvironmentFactory], name: str) -> Environment:
    """An environment for one episode. Never raises: see `Unavailable`."""
    factory = factories.get(name)
    if factory is None:
        known = ", ".join(sorted(factories))
        return Unavailable(
            name, LookupError(f"no environment {name!r} here, only {known}; add it to the configuration")
        )
    try:
        return factory()
    except Exception as error:  # noqa: BLE001 - the user's code; its failure becomes the record's cause
        return Unavailable(name, error)

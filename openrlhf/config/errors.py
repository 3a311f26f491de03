"""The one error that a wrong setting raises."""


class ConfigError(ValueError):
    """A setting that cannot be used: one sentence with the flag, the value found and the remedy.

    Commands print it without a traceback and exit with status 2.
    """

# SPDX-License-Identifier: Apache-2.0
"""The error of every wrong setting."""


class ConfigError(ValueError):
    """A flag has a wrong value, or two flags do not work together."""

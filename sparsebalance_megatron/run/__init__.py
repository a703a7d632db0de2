# SPDX-License-Identifier: Apache-2.0
"""One training run on one rank."""

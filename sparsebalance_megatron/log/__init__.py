# SPDX-License-Identifier: Apache-2.0
"""Writers and readers of a run's logs: one file per format."""

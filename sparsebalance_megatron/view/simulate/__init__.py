# SPDX-License-Identifier: Apache-2.0
"""Workloads planned without a cluster: sample lengths, model costs, the setups of the paper."""

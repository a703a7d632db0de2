# SPDX-License-Identifier: Apache-2.0
"""Pipeline schedules: orders of operations, their graphs, a simulator."""

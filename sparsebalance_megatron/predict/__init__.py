# SPDX-License-Identifier: Apache-2.0
"""Predictions of a job: a workload in, an outcome out. Commands and dry runs print outcomes."""

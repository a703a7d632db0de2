# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/simulate.py simulates."""

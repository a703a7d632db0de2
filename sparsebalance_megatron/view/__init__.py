# SPDX-License-Identifier: Apache-2.0
"""What people look at: reports, tables of predictions."""

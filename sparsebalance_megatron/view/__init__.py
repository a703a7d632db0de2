# SPDX-License-Identifier: Apache-2.0
"""Everything people look at: summary, report, trace, watch, simulate, advise."""

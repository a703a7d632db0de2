# SPDX-License-Identifier: Apache-2.0
"""Which KV blocks a query reads."""

# SPDX-License-Identifier: Apache-2.0
"""Plans where, when and with which budget every sample runs. Imports no torch and no Megatron."""

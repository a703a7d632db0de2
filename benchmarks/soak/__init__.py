# SPDX-License-Identifier: Apache-2.0
"""A long run that is disturbed at random, against one that is not. See ``../soak.py``."""

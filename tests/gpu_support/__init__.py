"""Which device the tests of `tests/gpu` run on."""

import os

DEVICE = os.environ.get("OFFBEAT_TEST_DEVICE", "cpu")

"""Read by every Python that a test starts. Collecting garbage while a trainer or vLLM is imported takes an eighth of
the time of such a process: here it is rare."""

import gc
import os

if "PYTEST_CURRENT_TEST" in os.environ:
    gc.set_threshold(500_000)

"""Read by every Python of a soaked run (bench/soak.py), whose programs stay as they are otherwise.

`SOAK_CLOCK` names a file with a float64: seconds by which the wall clock is off in all of them at once. A vLLM server
becomes one behind a faulty network (bench/soak_network.py), under the same process id.
"""

import mmap
import os
import struct
import sys
import time

if name := os.environ.get("SOAK_CLOCK"):
    with open(name, "rb") as _file:
        _offset = mmap.mmap(_file.fileno(), 8, prot=mmap.PROT_READ)
    _time, _time_ns = time.time, time.time_ns
    time.time = lambda: _time() + struct.unpack("<d", _offset)[0]
    time.time_ns = lambda: _time_ns() + int(1e9 * struct.unpack("<d", _offset)[0])

_words = sys.orig_argv[1:]
if _words[:2] == ["-m", "vllm.entrypoints.openai.api_server"] and "SOAK_BEHIND" not in os.environ:
    os.execv(sys.executable, [sys.executable, "-m", "bench.soak_network", *_words[2:]])

"""A vLLM plugin for benchmarks: the completions of a group get lengths from a list, whatever they say.

vLLM loads it through the entry point that `servers.write_plugin` puts beside it. The list is the JSON file that
BENCH_LENGTHS names; groups take from it in the order in which they arrive and begin anew at its end, so every step of
as many completions has the same lengths. Nothing but the count ends a completion, and no logit is changed. Requests
for one completion (a canary, a score) are left alone. Written for vllm 0.26 to 0.31.
"""

import copy
import json
import os
from typing import Any


def install() -> None:
    """Wrap vLLM's parameters of the completions of a group; nothing without BENCH_LENGTHS."""
    file = os.environ.get("BENCH_LENGTHS")
    if not file:
        return
    from vllm.v1.engine.parallel_sampling import ParentRequest

    original = ParentRequest.get_child_info
    if getattr(original, "gives_lengths", False):
        return
    with open(file) as stream:
        lengths = json.load(stream)
    taken = [0]

    def get_child_info(self: Any, index: int) -> tuple[str, Any]:
        name, shared = original(self, index)
        if not hasattr(self, "first_length"):
            self.first_length = taken[0]
            taken[0] += self.sampling_params.n
        params = copy.copy(shared)
        params.max_tokens = lengths[(self.first_length + index) % len(lengths)]
        params.ignore_eos, params.stop_token_ids, params.min_tokens = True, [], 0
        for key, value in (("_eos_token_id", None), ("_all_stop_token_ids", set())):
            if hasattr(params, key):
                setattr(params, key, value)
        return name, params

    get_child_info.gives_lengths = True
    ParentRequest.get_child_info = get_child_info

"""One evaluation cell in vLLM: reads request files, writes answer files; vllm_backend.py starts it as a module.

It is a separate process because vLLM releases GPU memory only when its process ends. An answer, {"rows", "dtype",
"version"} or {"error"}, is written atomically. The first request is named on the command line and makes the engine;
the files of further ones, two lines each, come on stdin until a request that is the last.
"""

import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from kit.rollout.server.amx import allow_amx


def main(request_file: str, answer_file: str) -> int:
    further: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read_further, args=(further,), daemon=True).start()
    engine: Any = None
    while True:
        request = json.loads(Path(request_file).read_text())
        try:
            engine = engine or _engine(request)
            answer, code = _complete(engine, request), 0
        except Exception as error:
            answer, code = {"error": f"{type(error).__name__}: {error}"}, 1
            import traceback

            traceback.print_exc()
        partial = Path(answer_file).with_suffix(".partial")
        partial.write_text(json.dumps(answer))
        partial.replace(answer_file)
        if code or request["is_last"]:
            return code
        request_file, answer_file = further.get(), further.get()


def _engine(request: dict) -> Any:
    import vllm
    from vllm.platforms import current_platform

    size = dict(request["size"])
    if current_platform.is_cpu():
        allow_amx()
        # The memory share and CUDA graphs apply to GPUs only; compiling takes minutes on a CPU.
        size = {key: size[key] for key in ("max_num_seqs",)} | {"enforce_eager": True}
    return vllm.LLM(
        model=request["model"],
        dtype="auto",
        trust_remote_code=False,
        generation_config="vllm",  # none of the checkpoint's own sampling defaults
        max_model_len=request["max_model_len"],
        # Token ids in, token ids out: the template is applied on our side. Only stop texts are searched in text.
        skip_tokenizer_init=not request["stop"],
        seed=0,
        **size,
    )


def _complete(engine: Any, request: dict) -> dict[str, Any]:
    import vllm

    settings = [
        vllm.SamplingParams(
            temperature=request["temperature"],
            max_tokens=request["max_new_tokens"],
            seed=seed,
            stop_token_ids=request["stops"],
            stop=request["stop"],
            ignore_eos=True,  # ignore the tokenizer's own end token: `stops` are all that the model stops at
            detokenize=bool(request["stop"]),
        )
        for seed in request["seeds"]
    ]
    prompts = [{"prompt_token_ids": request["prompts"][place]} for place in request["places"]]
    outputs = engine.generate(prompts, settings, use_tqdm=False)
    dtype = str(engine.llm_engine.model_config.dtype).removeprefix("torch.")
    return {"rows": [list(out.outputs[0].token_ids) for out in outputs], "dtype": dtype, "version": vllm.__version__}


def _read_further(found: "queue.SimpleQueue[str]") -> None:
    """Pass on the lines of stdin; kill this process and its children when its other end closes: the evaluation was
    killed, or is done."""
    for line in sys.stdin.buffer:
        found.put(line.decode().rstrip("\n"))
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    # vLLM sometimes hangs while shutting down its own processes; the answer is already on disk.
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

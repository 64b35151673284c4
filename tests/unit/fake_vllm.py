"""Stands in for `python -m vllm.entrypoints.openai.api_server`: its flags, log lines and streams for eval.serving.

A checkpoint folder whose config.json has "fail" ends it with that error before it serves; "short" makes it answer with
one token less than it was asked for, "lump" with all tokens in one chunk.
"""

import argparse
import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

TOKEN_S = 0.002


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    short = lump = False
    folder = Path()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:  # /health
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(self.folder / "asked.jsonl", "a") as file:
            file.write(json.dumps(body) + "\n")
        assert body["ignore_eos"] and body["min_tokens"] == body["max_tokens"] and body["stream"]
        made = body["max_tokens"] - self.short
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for _ in range(1 if self.lump else made):
            time.sleep(TOKEN_S)
            self._event({"choices": [{"index": 0, "text": ""}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": made}
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, value: dict) -> None:
        self.wfile.write(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")
        self.wfile.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--port", type=int)
    arguments, _ = parser.parse_known_args()
    config = json.loads((arguments.model / "config.json").read_text())
    if "fail" in config:
        print(f"(EngineCore pid=1) ERROR 11-21 core.py:1] ValueError: {config['fail']}")
        sys.exit("RuntimeError: Engine core initialization failed. See root cause above.")
    print("INFO gpu_model_runner.py:5355] Model loading took 2.89 GiB memory and 1.234567 seconds")
    print("INFO gpu_worker.py:693] Available KV cache memory: 118.51 GiB")
    print(
        "INFO kv_cache_utils.py:2465] GPU KV cache size: 4,315 tokens, Maximum concurrency for 12 tokens", flush=True
    )
    Handler.short, Handler.lump = config.get("short", False), config.get("lump", False)
    Handler.folder = arguments.model
    (arguments.model / "pid").write_text(str(os.getpid()))
    server = ThreadingHTTPServer(("127.0.0.1", arguments.port), Handler)
    server.request_queue_size = 64
    server.serve_forever()


if __name__ == "__main__":
    main()

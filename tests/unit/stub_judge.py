"""A judge that behaves as the text it is shown says, or as `choose` does: an OpenAI-compatible server in a thread."""

import contextlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# What a completion's text may ask the judge to do. "score N" and any other text: reply with "Score: N".
BEHAVIORS = ("late", "silent", "dropped", "drip", "garbage", "empty", "torn", "off", "500", "404", "flaky")


class StubJudge(ThreadingHTTPServer):
    """Counts requests by behavior and keeps their bodies and headers; `late_s` is how long a late reply takes."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, late_s: float):
        super().__init__(("127.0.0.1", 0), Handler)
        self.late_s, self.closing = late_s, threading.Event()
        self.asked: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self.status = 200
        self.choose: Callable[[str], str] = lambda text: text  # request -> text that says what to do
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address) -> None:
        """A client that no longer waits is no error here."""


class Handler(BaseHTTPRequestHandler):
    server: StubJudge

    def do_POST(self) -> None:
        judge = self.server
        with judge.lock:
            judge.at_once += 1
            judge.most_at_once = max(judge.most_at_once, judge.at_once)
        try:
            reply = self.answer(judge)
        finally:
            with judge.lock:  # before the reply is sent: its client asks again at once
                judge.at_once -= 1
        if reply is not None:
            self.reply(*reply)

    def answer(self, judge: StubJudge) -> tuple[int, dict | str] | None:
        """Status and body of the reply; None where there is none."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = judge.choose(body["messages"][0]["content"])
        does = next((word for word in BEHAVIORS if re.search(rf"\bjudge-{word}\b", text)), "score")
        with judge.lock:
            judge.asked[does] += 1
            judge.bodies.append(body)
            judge.headers.append(dict(self.headers))
            is_first = judge.asked[does] == 1
        if self.path != "/v1/chat/completions":
            return 404, {"error": f"no {self.path}"}
        if judge.status != 200:
            return judge.status, {"error": f"key {self.headers.get('Authorization')} is not valid"}
        if does == "late":
            judge.closing.wait(judge.late_s)
        elif does == "silent":
            judge.closing.wait()
            return None
        elif does == "dropped":
            self.connection.close()
            return None
        elif does == "drip":
            with contextlib.suppress(OSError):
                while not judge.closing.wait(0.05):
                    self.wfile.write(b"H")
            return None
        elif does == "torn":
            return 200, '{"choices": ['
        elif does in ("500", "404"):
            return int(does), {"error": "as asked"}
        elif does == "flaky" and is_first:
            return 503, {"error": "try again"}
        score = re.search(r"judge-score (\S+)", text)
        said = {"garbage": "I like it.", "empty": "", "off": "Score: 11"}.get(
            does, f"Score: {score[1] if score else 5}"
        )
        return 200, {"choices": [{"message": {"role": "assistant", "content": said}}]}

    def reply(self, status: int, body: dict | str) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        """Nothing: the test's output is its own."""


@contextlib.contextmanager
def stub_judge(late_s: float = 2.0) -> Iterator[StubJudge]:
    """A running stub; ends with the block, whatever its requests are doing."""
    judge = StubJudge(late_s)
    thread = threading.Thread(target=judge.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield judge
    finally:
        judge.closing.set()
        judge.shutdown()
        judge.socket.close()
        thread.join(5.0)

"""The judge behind a URL: what it is asked, what its replies are worth, and that nothing unknown is ever a score."""

import asyncio
import contextlib
import gzip
import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kit.core.config.schema import RewardConfig
from kit.core.errors import BadInput, CheckFailed
from reward import check_run, reward_functions, start
from reward.llm_judge import endpoint, filled, scored
from tests.unit.stub_judge import stub_judge

TEMPLATE = "Question: {question}\nReference: {gold}\nAnswer: {completion}\nLevel {level}. Reply {{so}}: Score: 7"
PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 40?"}]


@pytest.fixture
def judge():
    with stub_judge(late_s=30.0) as running:
        yield running


@pytest.fixture
def bound(tmp_path, judge):
    """bound(options) -> the reward, bound as a run binds it; its cache is in `tmp_path / "run"`.

    A request may take three seconds, so a stall of one or two does not make a good answer late.
    """
    (tmp_path / "judge.txt").write_text(TEMPLATE)

    def bind(folder="run", limit=1.0, **options):
        given = {"url": judge.url, "model": "stub", "prompt_file": str(tmp_path / "judge.txt"), "timeout_s": 3.0}
        given |= {"scale": [0, 10], "retries": 1, **options}
        config = RewardConfig(functions=["llm_judge"], options={"llm_judge": given}, max_unknown_fraction=limit)
        return reward_functions(config, ["question", "level"], folder=folder and tmp_path / folder)[0][0]

    return bind


def ask(reward, *texts, **columns):
    count = len(texts)
    batch = {"prompts": [PROMPT] * count, "gold": ["42"] * count, "level": [3] * count, "question": ["raw"] * count}
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    return asyncio.run(reward(completions=completions, **batch | columns))


def test_a_run_of_200_episodes_gets_every_score_that_was_given_and_no_other(bound, judge):
    """Late, wrong and absent answers in four steps of 50: nothing hangs, and nothing unknown is a number."""
    bad = ("late", "silent", "dropped", "drip", "garbage", "empty", "torn", "off", "500", "404")
    reward, rng = bound(concurrency=50), random.Random(0)
    seconds, seen = [], 0
    for step in range(4):
        kinds = [rng.choice(("good", "good", *bad)) for _ in range(50)]
        scores = [rng.choice(("0", "10", "2.5")) for _ in kinds]
        texts = [
            f"episode {step}.{number} judge-{f'score {score}' if kind == 'good' else kind}"
            for number, (kind, score) in enumerate(zip(kinds, scores, strict=True))
        ]
        began = time.perf_counter()
        found = ask(reward, *texts)
        seconds.append(time.perf_counter() - began)
        expected = [float(s) / 10 if kind == "good" else None for kind, s in zip(kinds, scores, strict=True)]
        assert found == expected
        seen += sum(value is None for value in found)
    # 50 at once, each at most 3 s, or 3 s more after a refusal and a pause of 0.5 s; the rest is a loaded machine's.
    # Waiting for a late reply would take 30 s, and for a silent or dripping judge forever.
    assert max(seconds) < 20.0
    assert reward.unknown_counts.total() == seen > 100
    reasons = {"late", "no connection", "unparseable", "no reply", "off the scale", "HTTP 500", "HTTP 404"}
    assert set(reward.unknown_counts) == reasons
    assert judge.asked["404"] == reward.unknown_counts["HTTP 404"], "what a retry cannot cure is not repeated"
    assert judge.asked["500"] == 2 * reward.unknown_counts["HTTP 500"]


def test_the_judge_is_shown_the_question_the_completion_and_the_columns(bound, judge):
    more = {"temperature": 0.5, "max_tokens": 9, "body": {"seed": 1}}
    text = "it is {gold} {{level}}"
    assert ask(bound(**more), text) == [0.5]
    (body,) = judge.bodies
    asked = f"Question: What is 2 + 40?\nReference: 42\nAnswer: {text}\nLevel 3. Reply {{so}}: Score: 7"
    assert body == {"model": "stub", "temperature": 0.5, "max_tokens": 9, "seed": 1} | {
        "messages": [{"role": "user", "content": asked}]
    }
    talk = [*PROMPT, {"role": "assistant", "content": "42"}, {"role": "user", "content": "Sure?"}]
    ask(bound(), "yes", prompts=[talk])
    assert (
        "Question: user: What is 2 + 40?\n\nassistant: 42\n\nuser: Sure?\n"
        in judge.bodies[1]["messages"][0]["content"]
    )
    assert filled("{a} {b}", {"a": {"é": 1}}) == '{"é": 1} '
    assert ask(bound(), "cut \ud83d", level=[{"half": "\ud83d"}]) == [0.5]
    assert "Answer: cut ?\n" in judge.bodies[2]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("reply", "pattern", "key", "expected"),
    [
        ("Score: 7", None, None, 0.7),
        ("score is **10**", None, None, 1.0),
        ("Score: 3. No, score: 4", None, None, 0.4),
        ("Score: 0", None, None, 0.0),
        ("7", None, None, None),
        ("Score: 7e3", None, None, 0.7),
        ("Score: -1", None, None, None),
        ("Score:-1", None, None, None),
        ("**Score:** 8/10", None, None, 0.8),
        ("Scores go from 1 to 9.", None, None, None),
        ("Score: 10.5", None, None, None),
        ("<v>2</v><v>5</v>", "<v>(.*?)</v>", None, 0.5),
        ("<v>nan</v>", "<v>(.*?)</v>", None, None),
        ("<v>x</v>", "<v>(.*?)</v>", None, None),
        ("<v></v>", "<v>(a)?</v>", None, None),
        ('{"score": 1} then {"score": 6, "why": "{"}', None, "score", 0.6),
        ('```json\n{"score": true}\n```', None, "score", 0.1),
        ('{"a": {"score": 6}}', None, "score", None),
        ('{"score": "6"}', None, "score", 0.6),
        ('{"score": [6]}', None, "score", None),
        ('{"score": 6} {"other": 1}', None, "score", 0.6),
        ("{" * 5000, None, "score", None),
        ('{"score": ' * 3000, None, "score", None),
        ('{"score": %s}' % ("9" * 400), None, "score", None),
        ('{"score": 1}' + "{" * 70_000, None, "score", None),
        ("", None, "score", None),
    ],
)
def test_the_score_of_a_reply(reply, pattern, key, expected):
    value, reason = scored(reply, pattern, key, 0.0, 10.0)
    assert value == (None if expected is None else pytest.approx(expected))
    assert (value is None) == (reason in ("unparseable", "off the scale"))


def test_a_resumed_run_takes_the_replies_of_the_cache_and_asks_for_no_failed_one(bound, judge):
    texts = ("judge-score 1", "judge-score 9", "judge-late", "judge-garbage")
    first = ask(bound(), *texts)
    assert first == [0.1, 0.9, None, None]
    asked = judge.asked.total()
    judge.late_s = 0.0  # by now the judge is awake
    assert ask(bound(), *texts) == [0.1, 0.9, 0.5, None]
    assert judge.asked.total() == asked + 1, "only what had no reply is asked again"
    assert ask(bound(temperature=0.1), texts[0]) == [0.1] and judge.asked.total() == asked + 2
    assert ask(bound(url=judge.url + "/chat/completions"), texts[0]) == [0.1] and judge.asked.total() == asked + 2
    for folder, options in ((None, {}), ("run", {"cache": None})):
        ask(bound(folder, **options), texts[0])
    assert judge.asked.total() == asked + 4


def test_a_damaged_reply_in_the_cache_is_asked_again(bound, judge, tmp_path):
    ask(bound(), "judge-score 1")
    (file,) = (tmp_path / "run" / "judge").rglob("*.json")
    for content in ("", "{", "[]", '{"reply": 1}'):
        file.write_text(content)
        assert ask(bound(), "judge-score 1") == [0.1]
        assert json.loads(file.read_text())["reply"] == "Score: 1"
    assert judge.asked.total() == 5


def test_equal_completions_are_asked_once_and_no_more_than_allowed_at_a_time(bound, judge):
    assert ask(bound(), *["judge-score 2"] * 8) == [0.2] * 8
    assert judge.asked.total() == 1
    judge.late_s = 0.1
    assert ask(bound(concurrency=3), *(f"judge-late {n}" for n in range(12))) == [0.5] * 12
    assert judge.most_at_once == 3


def test_what_fails_once_is_asked_again(bound, judge):
    assert ask(bound(), "judge-flaky") == [0.5] and judge.asked["flaky"] == 2
    judge.asked.clear()
    assert ask(bound(retries=0, cache=None), "judge-flaky") == [None] and judge.asked["flaky"] == 1


def test_too_many_unknown_scores_stop_the_run_with_the_reasons(bound):
    with pytest.raises(
        CheckFailed, match=r"unparseable 3(.*\n)*  unparseable: reply 'I like it.'(.*\n)*Compare these"
    ):
        ask(bound(limit=0.01), *(f"judge-garbage {n}" for n in range(3)))


KEY = "sk-very-secret"


def test_the_key_is_sent_and_shown_nowhere(bound, judge, monkeypatch, tmp_path):
    monkeypatch.setenv("JUDGE_KEY", f"{KEY}\n")  # as read from a file
    reward = bound(api_key_env="JUDGE_KEY")
    assert ask(reward, "judge-score 1") == [0.1]
    assert judge.headers[0]["Authorization"] == f"Bearer {KEY}"
    judge.status = 401  # the stub repeats the key in its error
    with pytest.raises(BadInput) as error:
        start([reward])
    assert "HTTP 401" in str(error.value) and KEY not in str(error.value) and "***" in str(error.value)
    shown = [json.dumps(reward.options), *(file.read_text() for file in tmp_path.rglob("*") if file.is_file())]
    assert not any(KEY in text for text in shown)
    for bad in (f"{KEY}\nmore", f"{KEY}é"):
        monkeypatch.setenv("JUDGE_KEY", bad)
        with pytest.raises(BadInput, match="JUDGE_KEY, whose value has a character") as error:
            bound(api_key_env="JUDGE_KEY")
        assert KEY not in str(error.value)


def test_a_judge_that_is_down_at_the_start_is_bad_input(bound, judge):
    start([bound()])
    assert judge.asked.total() == 1 and judge.bodies[0]["max_tokens"] == 1
    for url in ("http://127.0.0.1:9", judge.url + "/elsewhere"):
        began = time.perf_counter()
        with pytest.raises(BadInput, match=r"the judge stub at .* does not answer"):
            start([bound(url=url)])
        assert time.perf_counter() - began < 5
    judge.status = 503
    with pytest.raises(BadInput, match="HTTP 503"):
        start([bound()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:8000"}, "url is 'localhost:8000'. Write e.g. http://"),
        ({"url": "http://me:pass@host/v1"}, "holds a user name or a password"),
        ({"url": "http://host/v1?api_key=x"}, "seems to hold a key"),
        ({"pattern": "(", "json_key": None}, "is no regular expression"),
        ({"pattern": "[0-9]+"}, "has no group"),
        ({"pattern": "(.)", "json_key": "score"}, "pattern and json_key are both set"),
        ({"scale": [1]}, "the lowest and the highest score"),
        ({"scale": [3, 3]}, "the lowest and the highest score"),
        ({"scale": [0, float("inf")]}, "the lowest and the highest score"),
        ({"concurrency": 0}, "concurrency (0) must be at least 1"),
        ({"max_tokens": 0}, "max_tokens (0)"),
        ({"timeout_s": 0.0}, "timeout_s (0.0) must be above 0"),
        ({"retries": -1}, "retries (-1)"),
        ({"body": {"messages": []}}, "body names messages"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE, which is not set"),
        ({"prompt_file": "none.txt"}, "prompt_file cannot be read"),
        ({"model": None}, "llm_judge.model must be text"),
        ({"urls": "x"}, "unknown option. Did you mean 'url'"),
    ],
)
def test_a_judge_that_cannot_be_asked_is_bad_input(bound, options, message):
    with pytest.raises(BadInput) as error:
        bound(**options)
    assert message in str(error.value) and "pass@" not in str(error.value)


def test_a_template_must_show_the_completion_and_name_columns_that_there_are(bound, tmp_path):
    (tmp_path / "blind.txt").write_text("Is {{completion}} good?")
    with pytest.raises(BadInput, match=r"has no {completion}"):
        bound(prompt_file=str(tmp_path / "blind.txt"))
    (tmp_path / "other.txt").write_text("{completion} {levl} \\frac{1}{2} {}")
    reward = bound(prompt_file=str(tmp_path / "other.txt"))
    with pytest.raises(BadInput, match=r"names {levl}\. Did you mean level\? There are question, completion, gold"):
        check_run([reward], None, ["question", "level"])
    check_run([bound()], None, ["question", "level"])


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:1", "http://h:1/v1/chat/completions"),
        ("http://h:1/", "http://h:1/v1/chat/completions"),
        ("https://h/v1", "https://h/v1/chat/completions"),
        ("https://h/v1/chat/completions/", "https://h/v1/chat/completions"),
        ("https://h/openai/v4?version=3", "https://h/openai/v4/chat/completions?version=3"),
    ],
)
def test_the_address_of_a_url(url, address):
    assert endpoint(url) == address


def answering(status: int, headers: dict[str, str], body: bytes, asked: list[str]) -> ThreadingHTTPServer:
    """A server that gives every request this answer and notes its path."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def test_a_judge_sends_no_request_elsewhere_and_no_reply_without_end(bound):
    """Redirects, 12 MB, and 12 kB that unpack to 12 MB: no score, at the start bad input."""
    right = json.dumps({"choices": [{"message": {"content": "Score: 10"}}]}).encode()
    long, asked = right[:-1] + b" " * 12_000_000 + b"}", []
    other = answering(200, {}, right, asked)
    elsewhere = {"Location": f"http://127.0.0.1:{other.server_port}/v1/chat/completions"}
    answers = [(code, elsewhere, b"", f"HTTP {code}") for code in (301, 302, 303, 307, 308)]
    answers += [(200, {}, long, "no reply"), (200, {"Content-Encoding": "gzip"}, gzip.compress(long), "no reply")]
    try:
        for status, headers, body, reason in answers:
            server = answering(status, headers, body, [])
            url = f"http://127.0.0.1:{server.server_port}/v1"
            reward = bound(url=url, cache=None, timeout_s=20.0)
            assert ask(reward, "x") == [None] and set(reward.unknown_counts) == {reason}
            with pytest.raises(BadInput, match="does not answer"):
                start([reward])
            server.shutdown()
            server.server_close()
        assert asked == []
    finally:
        other.shutdown()
        other.server_close()

"""Versions of a server on a fake engine: what becomes of them, of requests under way and of a server that fails."""

import asyncio
from pathlib import Path

import pytest

from kit.rollout.protocol import decode_floats, encode_ids
from kit.rollout.server import versions
from tests.unit.fake_engine import (
    HASH,
    Engine,
    Server,
    ask,
    generate_body,
    started,
    without_vllm,
    write_adapter,
    write_base,
)


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch, tmp_path):
    without_vllm(monkeypatch, tmp_path)


@pytest.fixture
def base(tmp_path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def server(base, tmp_path) -> Server:
    return Server(Engine(base), tmp_path)


async def stage_two(server: Server, way: str = "remerge") -> None:
    """Versions 1 and 2 staged, 1 served, on the running event loop."""
    where = {"way": way, "run": "r", "session": "s1", "base_hash": HASH}
    for version in (1, 2):
        path = str(write_adapter(server.tmp_path / f"v{version}"))
        assert (await ask(server.app, "stage", {"path": path}, version=version, **where))[0] == 200
    assert (await ask(server.app, "activate", {"session": "s1", "version": 1}))[0] == 200


@pytest.mark.parametrize("way", ["adapter", "remerge"])
def test_only_the_served_version_answers(server, way):
    server.serve(1, way)
    assert server.stage(2, way)[0] == 200
    assert server.post("generate", generate_body(session="s1", version=1))[0] == 200
    for session, version in (("s1", 2), ("s2", 1), (None, None)):
        status, answer = server.post("generate", generate_body(session=session, version=version))
        assert status == 409 and "this server serves s1/1" in answer["error"]
    one = server.first_logprob("s1", 1)
    assert server.post("activate", {"session": "s1", "version": 2})[0] == 200
    assert server.first_logprob("s1", 2) != one
    assert server.post("activate", {"session": "s1", "version": 1})[0] == 200, "the one before, still staged"
    assert server.first_logprob("s1", 1) == one
    assert server.info()["served"] == {"way": way, "session": "s1", "version": 1}


def test_the_base_can_be_scored_beside_an_adapter_but_not_once_folded_in(server, base, tmp_path):
    bare = server.first_logprob(None, None)
    server.serve(1, "adapter")
    assert server.first_logprob(None, None) == bare != server.first_logprob("s1", 1)
    folded = Server(Engine(base), tmp_path)
    folded.serve(1, "remerge")
    assert folded.score(None, None)[0] == 409


def test_an_adapter_name_is_never_used_twice(server):
    """vLLM's prefix cache is keyed by it: a version made again must not be answered from the first one's blocks."""
    server.serve(1, "adapter")
    assert server.stage(2, "adapter")[0] == 200
    assert server.post("discard", {"session": "s1", "version": 2}) == (200, {})
    assert server.stage(2, "adapter")[0] == 200
    loaded = server.app.state.openai_serving_models.loaded
    assert loaded == ["r-s1-v000001", "r-s1-v000002", "r-s1-v000002-2"]
    assert server.stage(2, "adapter")[0] == 409


def test_discard_gives_the_slot_back_and_keeps_what_is_served(server):
    server.serve(1, "adapter")
    server.stage(2, "adapter")
    assert server.post("discard", {"session": "s1", "version": 1})[0] == 409
    assert server.post("discard", {"session": "s1", "version": 2})[0] == 200
    assert server.post("discard", {"session": "s1", "version": 77})[0] == 200
    assert server.engine.loras == {1}


@pytest.mark.parametrize("way", ["adapter", "remerge"])
def test_a_new_session_drops_what_the_older_one_of_its_run_left(server, way):
    server.serve(1, way, session="old")
    server.stage(2, way, session="old")
    server.serve(0, way, session="new")
    server.stage(5, way, session="x", run="another")
    assert server.post("activate", {"session": "old", "version": 1})[0] == 409
    assert server.post("activate", {"session": "old", "version": 2})[0] == 409
    assert server.first_logprob("new", 0)
    if way == "remerge":
        assert {"remerge_discard old/1", "remerge_discard old/2"} <= {*server.engine.calls}
    else:
        assert len(server.engine.loras) == 2


@pytest.mark.parametrize("run", ["r", "another"])
@pytest.mark.parametrize("way", ["adapter", "remerge"])
def test_what_is_served_stays_until_another_session_or_run_is_served(server, way, run):
    server.serve(1, way, session="old")
    assert server.stage(2, way, session="old")[0] == 200
    assert server.stage(1, way, session="new", run=run, use_dora=True)[0] == 422
    assert server.post("activate", {"session": "old", "version": 2})[0] == 200, "a refused one touches nothing"
    assert server.post("activate", {"session": "old", "version": 1})[0] == 200
    assert server.stage(1, way, session="new", run=run)[0] == 200
    assert server.first_logprob("old", 1) and server.info()["served"]["session"] == "old"
    assert len(server.engine.loras) in (0, 2), "vLLM has two places"
    assert server.post("activate", {"session": "new", "version": 1})[0] == 200
    assert server.post("activate", {"session": "old", "version": 1})[0] == 409
    assert len(server.engine.loras) in (0, 1)
    if way == "remerge":
        assert {"remerge_discard old/1", "remerge_discard old/2"} <= {*server.engine.calls}


@pytest.mark.parametrize("how", ["refused", "raised"])
def test_a_version_that_could_not_be_unloaded_is_told_to_the_log(server, monkeypatch, how):
    warned = []
    monkeypatch.setattr(versions.logger, "warning", lambda text, *values: warned.append(text % values))
    server.serve(1, "adapter")
    server.stage(2, "adapter")
    if how == "refused":
        server.app.state.openai_serving_models.refuses = "no such name"
    else:
        server.engine.raises.add("remove_lora")
    assert server.post("discard", {"session": "s1", "version": 2}) == (200, {})
    assert (
        len(warned) == 1
        and "s1/2" in warned[0]
        and ("no such name" if how == "refused" else "went wrong") in warned[0]
    )


def test_a_version_that_the_workers_keep_is_told_to_the_log(server, monkeypatch):
    warned = []
    monkeypatch.setattr(versions.logger, "warning", lambda text, *values: warned.append(text % values))
    server.stage(1, "remerge")
    server.engine.fails["remerge_discard"] = "busy"
    assert server.post("discard", {"session": "s1", "version": 1}) == (200, {})
    assert len(warned) == 1 and "s1/1" in warned[0] and "busy" in warned[0]


def test_a_run_on_other_weights_is_refused_with_both_hashes(server):
    status, answer = server.stage(1, "adapter", hash="cd" * 32)
    assert status == 409 and HASH in answer["error"] and "cd" * 32 in answer["error"]
    assert server.app.state.openai_serving_models.loaded == []


def test_an_adapter_is_not_served_on_weights_that_were_folded(server):
    server.serve(1, "remerge")
    status, answer = server.stage(2, "adapter")
    assert status == 409 and "Restart" in answer["error"]


@pytest.mark.parametrize("way", ["adapter", "remerge"])
def test_who_lost_a_server_to_another_trainer_is_told_whose_it_is(server, way):
    server.serve(1, way)
    server.stage(2, way)
    assert "trainer" not in server.post("generate", generate_body(session="s1", version=7))[1]["error"]
    server.serve(4, way, session="s2", run="theirs")
    theirs = "The trainer of run theirs has it (session s2, version 4)"
    for action, body in (("generate", generate_body(session="s1", version=1)), ("activate", {"version": 2})):
        status, answer = server.post(action, {"session": "s1", **body})
        assert status == 409 and theirs in answer["error"] and "estart" not in answer["error"], answer
    if way == "remerge":
        status, answer = server.stage(2, "adapter")
        assert status == 409 and theirs in answer["error"] and "Else restart the server." in answer["error"]


@pytest.mark.parametrize("way", ["adapter", "remerge"])
def test_a_refused_adapter_touches_nothing(server, way):
    server.serve(1, way)
    calls, loras = len(server.engine.calls), set(server.engine.loras)
    status, answer = server.stage(2, way, use_dora=True)
    assert status == 422 and "DoRA" in answer["error"]
    assert (len(server.engine.calls), server.engine.loras) == (calls, loras)
    assert server.post("activate", {"session": "s1", "version": 2})[0] == 409
    assert server.first_logprob("s1", 1)


def test_what_vllm_or_a_worker_refuses_is_not_staged(server):
    server.app.state.openai_serving_models.refuses = "no slot for it"
    assert server.stage(1, "adapter") == (422, {"error": f"vLLM did not load {server.tmp_path}/s1-1: no slot for it"})
    server.engine.fails["remerge_stage"] = "no place for it"
    status, answer = server.stage(2, "remerge")
    assert status == 422 and "no place for it" in answer["error"] and "rank 1 of 2" in answer["error"]
    assert server.engine.calls[-1] == "remerge_discard s1/2", "the ranks that did read it forget it"


def test_folding_in_runs_while_nothing_is_generated_and_nothing_is_cached(server):
    server.stage(1, "remerge")
    server.engine.calls.clear()
    server.engine.cache_is_busy = 2
    status, answer = server.post("activate", {"session": "s1", "version": 1})
    resets = ["reset_prefix_cache"] * 3
    assert server.engine.calls == ["pause", "remerge_activate s1/1", *resets, "resume"]
    assert status == 200 and {"pause", "remerge", "resume", "total"} <= answer["seconds"].keys()


class CachingEngine(Engine):
    """Answers from the blocks of a prefix cache where it has them, as vLLM does: an answer's log-probs are of the
    weights that computed the longest cached beginning of its prompt, under the name of the LoRA."""

    def __init__(self, base: Path):
        super().__init__(base)
        self.cached: dict[tuple, float] = {}  # (LoRA's name, token ids) -> what computed them

    async def generate(self, prompt: dict, params, request_id: str, lora_request=None):
        ids, name = tuple(prompt["prompt_token_ids"]), lora_request and lora_request.lora_name
        held = [key for key in self.cached if key[0] == name and ids[: len(key[1])] == key[1]]
        logprob = self.cached[max(held, key=lambda key: len(key[1]))] if held else super().logprob(lora_request)
        self.cached[name, ids] = self.answers = logprob
        async for output in super().generate(prompt, params, request_id, lora_request):
            yield output

    def logprob(self, lora) -> float:
        return self.answers

    async def reset_prefix_cache(self) -> bool:
        self.cached.clear()
        return await super().reset_prefix_cache()


@pytest.mark.parametrize("way", ["adapter", "remerge"])
def test_a_later_turn_after_a_sync_reads_nothing_that_the_version_before_computed(base, tmp_path, way):
    """Its tokens begin with those of the turn before, whose blocks the cache has."""

    def turn(server: Server, ids: list[int], version: int) -> float:
        body = generate_body(session="s1", version=version, token_ids=encode_ids(ids))
        status, answer = server.post("generate", body)
        assert status == 200, answer
        return float(decode_floats(answer["samples"][0]["logprobs"])[0])

    server, first = Server(CachingEngine(base), tmp_path), [1, 2, 3]
    server.serve(1, way)
    old = turn(server, first, 1)
    assert turn(server, [*first, 7, 8, 4], 1) == old and len(server.engine.cached) == 2
    server.serve(2, way)
    new = turn(server, [*first, 7, 8, 4, 5], 2)
    fresh = Server(Engine(base), tmp_path / "fresh")
    fresh.serve(1, way)
    fresh.serve(2, way)
    assert new == turn(fresh, [*first, 7, 8, 4, 5], 2) != old
    if way == "remerge":
        assert server.post("noise", {"session": "s1", "version": 2, "sigma": 0.01, "seed": 1})[0] == 200
        assert not server.engine.cached, "noise changes what the blocks should hold"


def test_a_prefix_cache_that_cannot_be_reset_damages_the_server(server, monkeypatch):
    server.stage(1, "remerge")
    server.engine.cache_is_busy = 10_000
    real = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: real(0))
    assert server.post("activate", {"session": "s1", "version": 1})[0] == 500
    assert server.score("s1", 1)[0] == 500 and "Restart" in server.info()["damaged"]


@pytest.mark.parametrize("how", ["fails", "raises"])
def test_a_failed_fold_leaves_the_version_before_in_the_weights(base, tmp_path, how):
    server = Server(Engine(base, workers=1), tmp_path)
    server.serve(1, "remerge")
    server.stage(2, "remerge")
    one = server.first_logprob("s1", 1)
    if how == "fails":
        server.engine.fails["remerge_activate s1/2"] = "out of memory"
    else:
        server.engine.raises.add("remerge_activate s1/2")
    status, answer = server.post("activate", {"session": "s1", "version": 2})
    assert status == 500 and ("out of memory" if how == "fails" else "went wrong") in answer["error"]
    assert server.engine.calls[-4:] == [
        "remerge_activate s1/2",
        "remerge_activate s1/1",
        "reset_prefix_cache",
        "resume",
    ]
    assert server.first_logprob("s1", 1) == one
    assert server.info()["served"]["version"] == 1


@pytest.mark.parametrize("how", ["fails", "raises"])
def test_a_fold_that_fails_on_one_of_several_workers_is_not_undone(server, how):
    """The other ranks may wait in a collective operation, which the next call would be paired with."""
    server.serve(1, "remerge")
    server.stage(2, "remerge")
    if how == "fails":
        server.engine.fails["remerge_activate s1/2"] = "out of memory"
    else:
        server.engine.raises.add("remerge_activate s1/2")
    assert server.post("activate", {"session": "s1", "version": 2})[0] == 500
    assert server.engine.calls[-3:] == ["remerge_activate s1/2", "reset_prefix_cache", "resume"]
    status, answer = server.score("s1", 1)
    assert status == 500 and "Restart the server" in answer["error"]


@pytest.mark.parametrize("method", ["remerge_setup", "remerge_stage", "remerge_activate"])
def test_workers_that_do_not_answer_damage_the_server(base, tmp_path, monkeypatch, method):
    monkeypatch.setattr(versions.Versions._workers, "__kwdefaults__", {"limit_s": 0.05})
    monkeypatch.setattr(versions, "SETUP_S", 0.05)
    server = Server(Engine(base, workers=1), tmp_path)
    if method != "remerge_setup":
        server.serve(1, "remerge")
    server.engine.hangs.add(method)
    answers = [server.stage(2, "remerge"), server.post("activate", {"session": "s1", "version": 2})]
    assert all(status in (422, 500) for status, _ in answers[method == "remerge_activate" :])
    damaged = server.info()["damaged"]
    assert f"did not answer {method} within 0.05 s" in damaged and "Restart the server" in damaged
    assert server.engine.calls.count("remerge_activate s1/1") == (method != "remerge_setup"), "no fold back"
    assert server.post("generate", generate_body())[0] == 500


def test_generation_is_resumed_when_it_could_not_be_paused(server):
    server.serve(1, "remerge")
    server.stage(2, "remerge")
    server.engine.raises.add("pause")
    assert server.post("activate", {"session": "s1", "version": 2})[0] == 500
    assert server.engine.calls[-2:] == ["pause", "resume"]
    assert server.first_logprob("s1", 1) and server.info()["damaged"] is None, "no weight was touched"


def test_generation_is_resumed_when_the_prefix_cache_cannot_be_reset(server):
    server.stage(1, "remerge")
    server.engine.raises.add("reset_prefix_cache")
    status, answer = server.post("activate", {"session": "s1", "version": 1})
    assert status == 500 and "resetting the prefix cache failed" in answer["error"]
    assert server.engine.calls[-2:] == ["reset_prefix_cache", "resume"]
    assert "Restart the server" in server.info()["damaged"]


def test_an_engine_that_does_not_resume_damages_the_server(server):
    server.stage(1, "remerge")
    server.engine.raises.add("resume")
    status, answer = server.post("activate", {"session": "s1", "version": 1})
    assert status == 500 and "resuming generation failed" in answer["error"]
    assert server.score("s1", 1)[0] == 500


def test_a_failed_fold_with_nothing_before_it_damages_the_server(server):
    server.stage(1, "remerge")
    server.engine.fails["remerge_activate"] = "out of memory"
    assert server.post("activate", {"session": "s1", "version": 1})[0] == 500
    for answer in (server.score(None, None), server.stage(2, "remerge"), server.post("generate", generate_body())):
        assert answer[0] == 500 and "Restart the server" in answer[1]["error"]


def test_a_sleeping_server_says_so_and_wakes_with_its_version(base, tmp_path):
    server = Server(Engine(base, sleep=True), tmp_path)
    server.serve(1, "adapter")
    assert server.post("sleep")[0] == 200 and server.info()["asleep"]
    for status, answer in (
        server.score("s1", 1),
        server.stage(2, "adapter"),
        server.post("generate", generate_body()),
    ):
        assert status == 503 and "wake" in answer["error"]
    assert server.post("sleep")[0] == 200 and server.engine.calls.count("sleep 1") == 1
    assert server.post("wake")[0] == 200 and not server.info()["asleep"]
    assert server.first_logprob("s1", 1)


@pytest.mark.parametrize(("action", "call"), [("sleep", "sleep 1"), ("wake", "wake")])
def test_an_engine_that_fails_to_sleep_or_wake_damages_the_server(base, tmp_path, action, call):
    server = Server(Engine(base, sleep=True), tmp_path)
    server.engine.sleeping = action == "wake"
    server.engine.raises.add(call)
    status, answer = server.post(action)
    assert status == 500 and "went wrong" in answer["error"]
    assert "Restart the server" in server.info()["damaged"] and server.score(None, None)[0] == 500


def test_an_engine_that_another_route_put_to_sleep_or_woke_is_taken_as_it_is(base, tmp_path):
    server = Server(Engine(base, sleep=True), tmp_path)
    server.engine.sleeping = True
    assert server.info()["asleep"]
    assert server.post("wake")[0] == 200 and server.engine.calls[-1] == "wake" and not server.info()["asleep"]
    assert server.post("sleep")[0] == 200
    server.engine.sleeping = False
    assert server.post("wake")[0] == 200 and server.engine.calls.count("wake") == 1
    assert server.score(None, None)[0] == 200


def test_layers_that_vllm_was_not_started_for_are_no_place_for_an_adapter(base, tmp_path):
    """vLLM would load such an adapter and leave these layers as they are."""
    server = Server(Engine(base, remerge=False, targets=["q_proj"]), tmp_path)
    assert server.info()["modules"] == ["model.layers.0.self_attn.q_proj"]
    status, answer = server.stage(1, "adapter")
    assert status == 422 and "model.layers.0.mlp.up_proj" in answer["error"]


def test_patterns_are_refused_by_the_way_that_ignores_them(server):
    pattern = {"alpha_pattern": {"q_proj": 8}}
    status, answer = server.stage(1, "adapter", **pattern)
    assert status == 422 and "alpha_pattern" in answer["error"]
    assert server.stage(1, "remerge", **pattern)[0] == 200


def test_sleep_without_the_option_is_refused(server):
    for action in ("sleep", "wake"):
        status, answer = server.post(action)
        assert status == 400 and "server.sleep" in answer["error"]


@pytest.mark.parametrize("by", ["discard", "another session"])
def test_a_version_is_unloaded_when_its_last_request_has_ended(server, by):
    """vLLM may read a running request's adapter again: without its directory the engine ends."""

    async def scenario() -> None:
        await stage_two(server, "adapter")
        server.engine.gate = asyncio.Event()
        unloaded, real = [], server.engine.remove_lora

        async def remove_lora(number: int) -> None:
            unloaded.append(server.engine.aborted)
            await real(number)

        server.engine.remove_lora = remove_lora
        body = generate_body(session="s1", version=1)
        request = asyncio.ensure_future(ask(server.app, "generate", body))
        await started(server)
        if by == "discard":
            assert (await ask(server.app, "activate", {"session": "s1", "version": 2}))[0] == 200
            assert (await ask(server.app, "discard", {"session": "s1", "version": 1}))[0] == 200
        else:
            path = str(write_adapter(server.tmp_path / "next"))
            where = {"way": "adapter", "run": "r", "session": "s2", "version": 1, "base_hash": HASH}
            assert (await ask(server.app, "stage", {"path": path}, **where))[0] == 200
            assert (await ask(server.app, "activate", {"session": "s2", "version": 1}))[0] == 200
        status, answer = await request
        assert status == 409 and "s1/1 was discarded" in answer["error"]
        assert ("The trainer of run r has it (session s2" in answer["error"]) == (by != "discard")
        assert server.engine.aborted == 1 and unloaded[-1] == 1

    asyncio.run(scenario())


def test_an_answer_that_spans_a_change_of_the_weights_is_of_no_version(server):
    async def scenario() -> None:
        await stage_two(server)
        server.engine.gate = asyncio.Event()
        request = asyncio.ensure_future(ask(server.app, "generate", generate_body(session="s1", version=1)))
        while not server.engine.params:
            await asyncio.sleep(0)
        assert (await ask(server.app, "activate", {"session": "s1", "version": 2}))[0] == 200
        server.engine.gate.set()
        status, answer = await request
        assert status == 409 and "changed" in answer["error"]

    asyncio.run(scenario())


def test_a_request_that_arrives_while_the_engine_resumes_gets_no_old_name_for_new_weights(server):
    async def scenario() -> None:
        await stage_two(server)
        arrived = []

        async def arrive() -> None:
            server.engine.gate = asyncio.Event()
            arrived.append(asyncio.ensure_future(ask(server.app, "generate", generate_body(session="s1", version=1))))
            while not server.engine.params:
                await asyncio.sleep(0)

        server.engine.while_resuming = arrive
        assert (await ask(server.app, "activate", {"session": "s1", "version": 2}))[0] == 200
        server.engine.gate.set()
        assert (await arrived[0])[0] == 409

    asyncio.run(scenario())


def test_an_answer_that_comes_while_the_weights_change_is_of_no_version(server):
    """It was partly sampled from the new weights, while the version before is still the one served."""

    async def scenario() -> None:
        await stage_two(server)
        server.engine.gate = asyncio.Event()
        request = asyncio.ensure_future(ask(server.app, "generate", generate_body(session="s1", version=1)))
        await started(server)
        real, during = server.engine.collective_rpc, []

        async def collective_rpc(method: str, *arguments) -> list[dict]:
            server.engine.gate.set()
            await asyncio.wait({request}, timeout=5)
            during.append(request.done() and request.result()[0])
            return await real(method, *arguments)

        server.engine.collective_rpc = collective_rpc
        assert (await ask(server.app, "activate", {"session": "s1", "version": 2}))[0] == 200
        assert during == [409] and "changed" in request.result()[1]["error"]

    asyncio.run(scenario())


@pytest.mark.parametrize("way", ["adapter", "remerge"])
def test_an_answer_that_spans_a_sleep_is_of_no_version(base, tmp_path, way):
    """The KV cache is gone in between."""
    server = Server(Engine(base, sleep=True), tmp_path)

    async def scenario() -> None:
        await stage_two(server, way)
        server.engine.gate = asyncio.Event()
        request = asyncio.ensure_future(ask(server.app, "generate", generate_body(session="s1", version=1)))
        await started(server)
        for action in ("sleep", "wake"):
            assert (await ask(server.app, action, {}))[0] == 200
        server.engine.gate.set()
        status, answer = await request
        assert status == 409 and "went to sleep" in answer["error"]
        assert (await ask(server.app, "generate", generate_body(session="s1", version=1)))[0] == 200

    asyncio.run(scenario())


def test_a_server_that_does_not_know_its_base_takes_no_adapter(tmp_path):
    (write_base(tmp_path / "other") / "manifest.json").unlink()
    server = Server(Engine(tmp_path / "other"), tmp_path)
    assert server.info()["base_hash"] is None
    status, answer = server.stage(1, "adapter")
    assert status == 409 and "was not written by python -m merge base" in answer["error"]


def test_noise_that_was_taken_off_is_not_reported(server):
    server.serve(1, "remerge")
    body = {"session": "s1", "version": 1, "seed": 5}
    assert server.post("noise", body | {"sigma": 0.01})[0] == 200 and server.info()["noise"] is not None
    assert server.post("noise", body | {"sigma": 0.0})[0] == 200 and server.info()["noise"] is None
    assert server.engine.calls.count("remerge_noise 0.0 5") == 1


def test_every_request_has_an_id_of_its_own_in_vllm(server):
    ids, real = [], server.engine.generate
    server.engine.generate = lambda prompt, params, request_id, **options: (
        ids.append(request_id) or real(prompt, params, request_id, **options)
    )
    for _ in range(2):
        sequences = [encode_ids([1, 2, 3])] * 2
        assert server.post("score", {"sequences": sequences, "session": None, "version": None})[0] == 200
        assert server.post("generate", generate_body(request_id="again"))[0] == 200
    assert len(ids) == 6 and len(set(ids)) == 6

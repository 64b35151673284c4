"""Rollouts from separate vLLM replicas: token ids in, token ids and the sampler's log-probs out.

The replicas hold the dequantized base (`python -m launch.server`) and receive each adapter version through
`kit/rollout/sync.py`. TRL's own server path is not used: it merges the adapter into the NF4 weights and streams
packed bytes. The trainer's process needs no vLLM.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from kit.core.cards import W8A16
from kit.core.config import speculation_rules
from kit.core.config.cache_rules import FASTEST, FP8, MODEL_DTYPE, called
from kit.core.config.checks import is_main_process
from kit.core.config.format_rules import served_format
from kit.core.config.schema import Config
from kit.core.errors import BadInput, CheckFailed, KitError, failure_of
from kit.core.file_kinds import BASE_HASH, SHARED_BASE
from kit.core.limits import VLLM_BELOW, VLLM_FROM
from kit.core.run_directory import RunDir, base_directory
from kit.core.run_files import read_object
from kit.core.tokenizer_hash import tokenizer_hash
from kit.policy.gpu_memory import free_gpu_cache
from kit.policy.stop_texts import StopTexts
from kit.rollout import drafts
from kit.rollout.episodes import EpisodeResult, EpisodeRunner
from kit.rollout.generation import Generation
from kit.rollout.overlap import Ahead
from kit.rollout.policy_view import PolicyView, Processes, Report, Rollouts, StreamedRows
from kit.rollout.protocol import PROTOCOL, Drafted, Info
from kit.rollout.recovery import Recovery, ReplicasFailed
from kit.rollout.replica import Replica, ReplicaError, Sample, ask_all, is_tested_vllm
from kit.rollout.restart_requests import allowed_wait_s
from kit.rollout.server_watch import watch
from kit.rollout.sync import START, AdapterSync, restart_hint, start_hint

FIRST_ANSWER_S = 5.0  # timeout of one request while a replica starts
OTHER_REQUESTS = 10  # sequential requests of a step besides generation: wake, stage, activate, score, roll back, sleep


class ServerRollout:
    """Generate the groups of a step on the replicas of `rollout.server_urls`; a `Sampler` used by every trainer
    process. The report of `generate` has figures of the sync in the main process, and `rollout_hidden`: the seconds of
    generation after `begin`, before `generate` waited for the rest. With `episodes`, also an `EpisodeSampler`.
    """

    def __init__(self, config: Config, tokenizer: Any, run: RunDir, episodes: EpisodeRunner | None = None):
        self.config, self.tokenizer, self.run, self.episodes = config, tokenizer, run, episodes
        rollout = config.rollout
        self.context = rollout.max_prompt_length + rollout.max_completion_length
        self.replicas = [Replica(url, rollout.request_timeout_s) for url in rollout.server_urls]
        self.sync = AdapterSync(self.replicas, config, run)
        if (wait_s := allowed_wait_s()) is not None:
            self.sync.recovery = Recovery(self.replicas, run, wait_s, self.sync.restore)
        self._ahead: Ahead | None = None
        self._infos: dict[str, Info] = {}
        self._served: int | None = None  # the same in every process
        self._may_be_asleep = False
        self._silent: set[str] = set()
        self._mapped_gib: float | None = None  # of the trainer's base in the replica's memory
        self._drafted: dict[str, Drafted | None] = {}  # by URL, of replicas that draft
        self._waiting: Any = None  # the process group in which processes wait for the main one

    def check(self, linears: list[str], vocabulary: int) -> None:
        """Wait for every replica and reject those that cannot serve this run; called before any weight is loaded.

        `linears` are the names of the layers that get an adapter. `CheckFailed` after `rollout.server_wait_s`.
        """
        deadline = time.monotonic() + self.config.rollout.server_wait_s
        tokenizer = tokenizer_hash(self.tokenizer)
        self._infos = {replica.url: self._wait(replica, deadline) for replica in self.replicas}
        if self.sync.recovery is not None:
            self.sync.recovery.know(self._infos)
        faults = []
        for url, info in self._infos.items():
            faults += [f"{url}: {fault}" for fault in self._faults(info, linears, vocabulary, tokenizer)]
        if faults:
            raise BadInput("\n".join(faults))
        for file in (self.run.base_file, base_directory(self.config) / "base.json"):
            if file.is_file():
                self.check_base(read_object(file, BASE_HASH)["hash"], str(file))
                break
        self._may_be_asleep = any(info["asleep"] for info in self._infos.values())
        if (product := self.product) and product.startswith(W8A16) and is_main_process():
            print(f"servers   FP8 weights, inputs in 16 bits: {product}", flush=True)
        if self.config.server.kv_cache == FASTEST and self.kv_cache != MODEL_DTYPE and is_main_process():
            print(f"servers   KV cache: {self.kv_cache} (server.kv_cache {FASTEST})", flush=True)
        if asked := speculation_rules.wanted(self.config.server):
            self._drafted = {url: info.get("drafted") for url, info in self._infos.items()}
            if is_main_process():
                print(f"servers   speculative decoding: {speculation_rules.called(asked)}", flush=True)
        if self.config.environment.is_given and is_main_process():
            for url in [url for url, info in self._infos.items() if not info["prefix_caching"]]:
                print(
                    f"{url} has no prefix cache: it computes each turn's whole context again. Restart it with "
                    "server.vllm {enable_prefix_caching: true} if its model allows that.",
                    flush=True,
                )

    @property
    def product(self) -> str | None:
        """Name what the replicas multiply (W8A8, W8A16, W16A16), and whether `server.force_w8a16` made it so; None if
        that is not known."""
        found = {(info.get("product"), info.get("is_forced", False)) for info in self._infos.values()}
        names = [f"{name} (forced)" if forced else name for name, forced in sorted(found, key=str) if name]
        return ", ".join(names) or None

    @property
    def kv_cache(self) -> str | None:
        """The replicas' KV cache: its dtype, auto for the model's own, and the attention backend if it was set."""
        found = {called(cache_dtype(info), info.get("attention_backend")) for info in self._infos.values()}
        return ", ".join(sorted(found)) or None

    def check_base(self, base_hash: str, source: str = "the trainer's base") -> None:
        """`BadInput` unless every replica holds the base with this base hash."""
        for url, info in self._infos.items():
            if info["base_hash"] != base_hash:
                held = f"{info['base_hash']:.12}" if info["base_hash"] else "unknown (no base.json beside its weights)"
                raise BadInput(
                    f"{url} serves {info['model']}, whose base hash is {held}; {source} has {base_hash[:12]}. Write "
                    f"this model's base (python -m merge base --config ...) and restart the replica ({START})."
                )

    def share_base(self) -> dict[str, Any]:
        """Ask where the replica holds its base in memory (`server.share_base`), as kit/weights/shared_memory.py
        describes it; from now on the run ends when the replica does (`server_watch`). `BadInput` if it shares none."""
        from kit.weights.shared_memory import described_bytes

        (replica,) = self.replicas
        try:
            file = replica.share()
        except ReplicaError as error:
            raise BadInput(
                f"{replica.url} does not share its base (server.share_base): {error.text.rstrip('.')}. Restart it "
                f"with this config ({START}), or set server.share_base to false."
            ) from None
        try:
            described = read_object(file, SHARED_BASE)
        except BadInput:
            raise BadInput(
                f"{file}, in which {replica.url} says where its base is, cannot be read here. Trainer and server must "
                "run on one machine, as one user; else set server.share_base to false."
            ) from None
        watch(described["pid"], replica.url)
        self._mapped_gib = round(described_bytes(described) / 2**30, 4)
        if is_main_process():
            print(f"base      {self._mapped_gib:.2f} GiB mapped from {replica.url}, which holds them once", flush=True)
        return described

    def _faults(self, info: Info, linears: list[str], vocabulary: int, tokenizer: str) -> list[str]:
        """Reasons why a replica cannot serve this run, each with its fix."""
        rollout, way = self.config.rollout, self.config.rollout.sync
        found = []
        if not is_tested_vllm(info["vllm"]):
            tested = f"{'.'.join(map(str, VLLM_FROM))} <= version < {'.'.join(map(str, VLLM_BELOW))}"
            found.append(
                f"vLLM {info['vllm']} is not one that the kit was tested with ({tested}). Install one of these."
            )
        if info["vocab_size"] != vocabulary:
            found.append(
                f"{info['model']} has a vocabulary of {info['vocab_size']} entries, {self.config.model.source} one of "
                f"{vocabulary}. Serve the base that model.id or model.path names."
            )
        elif info["tokenizer_hash"] != tokenizer:
            found.append(
                f"the tokenizer of {info['model']} is not the one of {self.config.model.source}: the same text would "
                "be other token ids. Serve the base that model.id or model.path names."
            )
        if info["max_model_len"] < self.context:
            found.append(
                f"it serves {info['max_model_len']} tokens of context; max_prompt_length + max_completion_length need "
                f"{self.context}. Restart it with this config ({START})."
            )
        if info["logprobs_mode"] != "processed_logprobs":
            found.append(
                f"its log-probs are {info['logprobs_mode']}, before temperature and sampling. Restart it with "
                "--logprobs-mode processed_logprobs."
            )
        if info["max_num_seqs"] < rollout.group_size:
            found.append(
                f"it generates {info['max_num_seqs']} completions at once, fewer than rollout.group_size "
                f"({rollout.group_size}). Raise server.max_num_seqs and restart it."
            )
        found += self._other_settings(info)
        if self.config.server.sleep and not info["sleep_enabled"]:
            found.append(f"server.sleep is true and it was started without. Restart it with this config ({START}).")
        if info.get("damaged"):
            found.append(info["damaged"])
        if way not in info["sync"]:
            why = (info.get("refused") or {}).get(way, f"it offers {', '.join(info['sync']) or 'nothing'}").rstrip(".")
            found.append(
                f"rollout.sync is {way}, which it cannot do: {why}. Restart it with this config ({START}), or set "
                "rollout.sync."
            )
        elif way == "adapter" and (info["max_lora_rank"] or 0) < self.config.policy.lora_rank:
            found.append(
                f"it serves adapters up to rank {info['max_lora_rank']}, policy.lora_rank is "
                f"{self.config.policy.lora_rank}. Restart it with this config ({START})."
            )
        if info["modules"] is not None and (missing := sorted(set(linears) - set(info["modules"]))):
            found.append(
                f"{len(missing)} of the {len(linears)} layers with an adapter cannot take one there, first "
                f"{missing[:3]}. Leave them out of policy.target_modules."
            )
        return found

    def _other_settings(self, info: Info) -> list[str]:
        """Settings of the `server` group that a replica was started with differently: by hand, or before the YAML
        changed."""
        found, server = [], self.config.server
        fmt = served_format(self.config)
        if (computes := info.get("quant_cfg")) != (fmt and fmt.name):
            found.append(
                f"it computes in {computes or 'unquantized weights'}, policy.quant_cfg says "
                f"{fmt.name if fmt else 'nothing'}. Restart it with this config ({START})."
            )
        held = {
            "weights": info["weights"],
            "kv_cache": cache_dtype(info),
            "tensor_parallel": info["tensor_parallel"],
        }
        wanted = {key: getattr(server, key) for key in held}
        if server.kv_cache == FASTEST and held["kv_cache"] in (MODEL_DTYPE, FP8):
            wanted["kv_cache"] = held["kv_cache"]  # the server's machine decides
        if server.weights == "bf16" and self.config.model.dtype != "bfloat16":
            wanted["weights"] = self.config.model.dtype  # bf16 stands for unquantized weights
        if info.get("is_forced", False) != server.force_w8a16:
            how = "with" if info.get("is_forced") else "without"
            found.append(f"it was started {how} server.force_w8a16. Restart it with this config ({START}).")
        if (made := info.get("speculation")) != (asked := speculation_rules.wanted(server)):
            found.append(
                f"it makes {speculation_rules.called(made)}, server.speculation and its keys say "
                f"{speculation_rules.called(asked)}. Restart it with this config ({START})."
            )
        for key, value in held.items():
            if value != wanted[key]:
                found.append(
                    f"its {key} is {info.get(key)}, server.{key} says {wanted[key]}. Restart it with this config "
                    f"({START}), or set server.{key} to what it serves."
                )
        return found

    def _wait(self, replica: Replica, deadline: float) -> Info:
        """Return the replica's info once it answers; refused, hanging and unready ones all fail at the deadline."""
        limit, said = self.config.rollout.server_wait_s, False
        while True:
            try:
                info = replica.info(timeout_s=min(FIRST_ANSWER_S, limit))
                if info.get("protocol") != PROTOCOL:
                    raise BadInput(
                        f"{replica.url} speaks protocol {info.get('protocol')!r} of the kit, the trainer {PROTOCOL}. "
                        "Start it from the same checkout."
                    )
                return info
            except ReplicaError as error:
                if error.status == 404:
                    raise BadInput(
                        f"{replica.url} is a server without /v1/rollout: a vLLM server that the kit did not start, or "
                        f"another program. Start it with {START}, or set rollout.server_urls."
                    ) from None
                if error.status in (401, 403):
                    raise BadInput(
                        f"{replica.url} refuses the API key. Set VLLM_API_KEY to the one it was started with."
                    ) from None
                last = error
            if time.monotonic() > deadline:
                raise CheckFailed(
                    f"the rollout server at {replica.url} did not answer within {limit:.0f} s ({last.text}). Start it "
                    f"({start_hint(self.run, [replica.url])}), or set rollout.server_urls."
                )
            if not said and is_main_process():
                print(
                    f"waiting for {replica.url}, at most {limit:g} s (rollout.server_wait_s): {last.text}", flush=True
                )
                said = True
            time.sleep(1.0)

    def generate(self, policy: PolicyView, prompt_ids: list[list[int]], group: int | None = None) -> Rollouts:
        """Complete this process's prompts, in order.

        The main process syncs the adapter and requests all processes' groups; a prompt is repeated `group` (default
        `group_size`) times in a row, so it is sent once with n = group. Every process gets its share.
        """
        from accelerate.utils import gather_object

        everything, report, stop = gather_object(prompt_ids), self._new_report(), policy.stop_token_ids
        if group is None and self._ahead is not None:
            samples, version = self._take(policy, everything, report)
        else:
            self.sync.scorer.choose(everything)
            samples = self._sample(policy, lambda: self._generate_groups(everything, stop, group), report)
            version = self._served
        self.sync.scorer.extend([ids for ids, *_ in samples])
        start = policy.processes.process_index * len(prompt_ids)
        mine = samples[start : start + len(prompt_ids)]
        is_replayed = self.config.rollout.routing != "own" and group is None  # held-out completions are not scored
        experts = [taken for _, _, taken in mine] if is_replayed else None
        return Rollouts([ids for ids, *_ in mine], [logps for _, logps, _ in mine], version, report, experts)

    def begin(self, policy: PolicyView, prompt_ids: list[list[int]]) -> Report:
        """Sync the adapter, then start generating for this process's prompts. The next `generate` must be for the same
        prompts and takes the result. Without prompts, only sync. Called by all processes together."""
        stop = policy.stop_token_ids
        return self._begin(policy, prompt_ids, lambda prompts: self._generate_groups(prompts, stop))

    def stream(self, policy: PolicyView, prompt_ids: list[list[int]], least: int) -> Iterator[StreamedRows]:
        """Complete this process's prompts, each `group_size` times in a row, and yield groups while the replicas
        generate others: `least` or more, as soon as every process has them. Called by all processes together, which
        get equally many each time.

        `rollout_hidden` of the last report is the seconds of generation that nobody waited for.
        """
        from accelerate.utils import gather_object

        processes, group, report = policy.processes, self.config.rollout.group_size, self._new_report()
        everything, rows = gather_object(prompt_ids), len(prompt_ids)
        samples: list[Any] = [None] * len(everything)
        self.sync.scorer.choose(everything)
        error, first = self._prepare(policy), processes.process_index * rows
        with contextlib.ExitStack() as requests:
            stream: Any = None
            started = waited = 0.0

            def begin() -> None:
                nonlocal stream, started
                self._wake(report)
                self._sync(policy, report)
                generation, prompts = self._generation(policy.stop_token_ids), self._prompts(everything, group)
                stream = requests.enter_context(generation.stream(prompts, group, processes.num_processes))
                started = time.perf_counter()

            def take() -> list[tuple[int, list[tuple]]]:
                nonlocal waited
                asked = time.perf_counter()
                parts = stream.take(least)
                waited += time.perf_counter() - asked
                size = stream.size
                return [
                    (process * size + number, [_sample_facts(one) for one in found])
                    for process, part in enumerate(parts)
                    for number, found in part
                ]

            self._in_main_process(processes, begin, error)
            missing = len(everything)
            while missing:
                fresh = dict(self._in_main_process(processes, take))
                for number, found in fresh.items():
                    samples[number * group : (number + 1) * group] = found
                missing -= len(fresh) * group
                if not missing:
                    self.sync.scorer.extend([ids for ids, *_ in samples])
                    report.seconds["rollout_hidden"] = max(0.0, stream.ended - started - waited) if stream else 0.0
                    self._in_main_process(processes, lambda: self._end_of_generation(report))
                numbers = sorted(number * group - first for number in fresh)
                places = [at + i for at in numbers if 0 <= at < rows for i in range(group)]
                mine = [samples[first + place] for place in places]
                made = [ids for ids, *_ in mine], [logps for _, logps, _ in mine]
                yield StreamedRows(places, Rollouts(*made, self._served, report), not missing)

    def _end_of_generation(self, report: Report) -> None:
        self._count_drafts(report)
        self._drop_connections()

    def run_episodes(
        self, policy: PolicyView, rows: list[dict], group: int | None = None
    ) -> tuple[list[EpisodeResult], Report]:
        """Run an episode on each of this process's rows, in order; `group` (default `group_size`) in a row are alike.

        All episodes of a step run in the main process, turn by turn on the replicas, and every process gets its
        share. So the environments are there: in the other processes a result has no `episode`, and the environment's
        own reward travels with it. The caller closes the episodes that it gets.
        """
        from accelerate.utils import gather_object

        everything, report = gather_object(rows), self._new_report()
        if group is None and self._ahead is not None:
            results, _ = self._take(policy, everything, report)
        else:
            size = group or self.config.rollout.group_size
            self._choose_canary(everything, size)
            work = lambda: self._all_episodes(everything, policy.stop_token_ids, size)  # noqa: E731
            results = self._sample(policy, work, report)
        self.sync.scorer.extend([one.first_turn for one in results], [one.prompt_ids for one in results])
        start = policy.processes.process_index * len(rows)
        for number, result in enumerate(results):
            if result.episode is not None and not start <= number < start + len(rows):
                result.episode.close()
        return results[start : start + len(rows)], report

    def begin_episodes(self, policy: PolicyView, rows: list[dict]) -> Report:
        """Sync the adapter, then start the episodes of this process's rows, as `begin` does for prompts."""
        stop, size = policy.stop_token_ids, self.config.rollout.group_size
        return self._begin(policy, rows, lambda everything: self._all_episodes(everything, stop, size))

    def _begin(self, policy: PolicyView, rows: list, generate: Callable[[list], list]) -> Report:
        from accelerate.utils import gather_object

        ahead, report = Ahead(gather_object(rows), policy.version), Report({}, {})
        error = self._prepare(policy)
        start = lambda: self._start(policy, ahead, lambda: generate(ahead.rows), report)  # noqa: E731
        self._in_main_process(policy.processes, start, error)
        self._ahead = ahead if ahead.rows else None
        return report

    def settle(self, policy: PolicyView) -> Report:
        """Wait until all replicas serve the version whose sync `begin` started, as they do before the policy changes;
        the figures of that sync. Called by all processes together."""
        report = Report({}, {})
        if self._ahead is not None and not self._ahead.is_synced:
            self._ahead.is_synced = True
            with timed(report.seconds, "sync"):
                report.figures.update(self._in_main_process(policy.processes, self._ahead.synced))
        return report

    def _new_report(self) -> Report:
        figures = {} if self._mapped_gib is None else {"mapped_gib": self._mapped_gib}
        return Report(figures, {"rollout_hidden": 0.0} if self.config.rollout.overlap else {})

    def _take(self, policy: PolicyView, rows: list, report: Report) -> tuple[list, int]:
        """Return what `begin` requested and the version that made it."""
        ahead, self._ahead = self._ahead, None
        if ahead.rows != rows:
            raise CheckFailed(
                f"the {len(rows)} prompts of this step are not the {len(ahead.rows)} that were generated ahead: "
                "the trainer no longer draws its batches as rollout.overlap expects. Set it to false."
            )
        samples = self._in_main_process(policy.processes, lambda: self._counted(ahead.take, report))
        report.seconds["rollout_hidden"] = ahead.hidden_s
        return samples, ahead.version

    def _sample(self, policy: PolicyView, generate: Callable[[], list], report: Report) -> list:
        """Sync the adapter and generate, in the main process; return its result in every process."""
        if self.config.server.sleep:
            # In every process, before the replicas wake: they need the memory of the update's cached blocks.
            free_gpu_cache()
            policy.processes.wait_for_everyone()
        self.settle(policy)
        error = self._prepare(policy)
        return self._in_main_process(policy.processes, lambda: self._step(policy, generate, report), error)

    def _choose_canary(self, rows: list[dict], group: int) -> None:
        """Let the canary score prompts of rows whose episodes have not started; their own follow with the first
        turns."""
        if not self.sync.scorer.sequences:
            first = rows[: group * self.sync.scorer.prompts]
            self.sync.scorer.choose([self.episodes.tokens.prompt_ids(row["prompt"], None) for row in first])

    def _prepare(self, policy: PolicyView) -> KitError | None:
        """For a split base, let all processes collect what a sync needs; return the error of this process, which is
        raised once all have met."""
        if not policy.is_split or policy.version == self._served:
            return None
        try:
            self.sync.prepare(policy)
        except KitError as error:
            return error
        return None

    def _in_main_process(self, processes: Processes, work: Callable[[], Any], error: KitError | None = None) -> Any:
        """Run `work` in the main process and return its result in every process; its error is raised in every process
        too, since the others wait for the outcome."""
        self._meet()
        outcome: list[Any] = [None, None, error]
        if processes.is_main_process and error is None:
            try:
                outcome[0] = work()
            except KitError as found:
                outcome[2] = found
            except Exception as found:
                outcome[2] = failure_of(found)(f"the rollout failed: {type(found).__name__}: {found}")
            outcome[1] = self.sync.served
        self._broadcast(outcome)
        if outcome[2] is not None:
            raise outcome[2]
        self._served = outcome[1]
        return outcome[0]

    def _meet(self) -> None:
        """Create once, in every process, the group in which they wait for the main one. On the CPU: a waiting NCCL
        collective is a spinning kernel, which takes time from a replica on the same card."""
        from torch import distributed

        is_alone = (
            not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1
        )
        if self._waiting is None and not is_alone:
            self._waiting = distributed.new_group(backend="gloo", timeout=timedelta(seconds=self.longest_s))

    def _broadcast(self, outcome: list[Any]) -> None:
        """Replace every process's `outcome` with the main process's."""
        if self._waiting is not None:
            from torch import distributed

            distributed.broadcast_object_list(outcome, src=0, group=self._waiting)

    @property
    def longest_s(self) -> float:
        """Upper bound in seconds on what the main process does alone, since each of its requests has a limit. If the
        main process dies, the others notice at once."""
        from torch import distributed

        config, rollout = self.config, self.config.rollout
        completions = config.train.per_device_train_batch_size * config.train.gradient_accumulation_steps
        prompts = completions * distributed.get_world_size() // rollout.group_size + config.watch.eval_problems
        longest = rollout.server_wait_s + (allowed_wait_s() or 0.0)
        if config.environment.is_given:  # a request for each turn of each episode; their environments run side by side
            prompts *= rollout.group_size * config.environment.max_turns
            longest += config.environment.episode_timeout_s
        at_once = max(1, min(rollout.max_in_flight, 2 * len(self.replicas)))  # the dispatcher never sends fewer
        requests = OTHER_REQUESTS + math.ceil(prompts / at_once) * (1 + rollout.retries)
        return longest + requests * rollout.request_timeout_s

    def close(self) -> None:
        """Leave the replicas awake; called once by the main process, however the run ends."""
        self.sync.settle()
        if not self._may_be_asleep:
            return
        free_gpu_cache()
        asked = [replica for replica in self.replicas if replica.url not in self._silent]
        failed = ask_all(asked, lambda replica: replica.wake(), probe="wake")[1]
        reasons = {url: error.text for url, error in failed.items()} | dict.fromkeys(self._silent, "it hangs")
        for url, reason in reasons.items():
            print(f"{url} may be left asleep: {reason}. The next start of a trainer wakes it.", flush=True)

    def _step(self, policy: PolicyView, generate: Callable[[], list], report: Report) -> list:
        """Wake, sync, generate, sleep; return what `generate` makes for all processes."""
        self._wake(report)
        self._sync(policy, report)
        samples = self._counted(generate, report)
        if self.config.server.sleep:
            with timed(report.seconds, "sleep"):
                self._may_be_asleep = True
                self.sync.settle()  # a sleeping replica cannot discard an adapter
                self._all_or_fail(lambda replica: replica.sleep(), "go to sleep")
        self._drop_connections()
        return samples

    def _wake(self, report: Report) -> None:
        if self._may_be_asleep:
            with timed(report.seconds, "wake"):
                self._all_or_fail(lambda replica: replica.wake(), "wake up")
            self._may_be_asleep = False

    def _start(self, policy: PolicyView, ahead: Ahead, generate: Callable[[], list], report: Report) -> None:
        """Sync and generate in the background; without rows, sync."""
        if not ahead.rows:
            self._sync(policy, report)
            return
        self._check_version(policy)

        def work() -> list:
            samples = generate()
            self._drop_connections()
            return samples

        with timed(report.seconds, "sync"):
            sync, score = self.sync.begin(policy)
            ahead.start(sync, work)
            if not score():
                ahead.synced()  # raises the error, once the replicas are back at the version before
        self._note_servers(report)

    def _sync(self, policy: PolicyView, report: Report) -> None:
        self._check_version(policy)
        with timed(report.seconds, "sync"):
            report.figures.update(self.sync.update(policy))
        self._note_servers(report)

    def _check_version(self, policy: PolicyView) -> None:
        if self._ahead is not None and policy.version != self._ahead.version:
            raise RuntimeError("a new version while requests of the one before are under way, which it would abort")

    def _note_servers(self, report: Report) -> None:
        report.figures.update(server_product=self.product, server_kv_cache=self.kv_cache)

    def _counted(self, generate: Callable[[], list], report: Report) -> list:
        """Return what `generate` makes; report what came of the drafts."""
        samples = generate()
        self._count_drafts(report)
        return samples

    def _count_drafts(self, report: Report) -> None:
        """Report what came of the drafts since the last time, if replicas draft."""
        if self._drafted:
            before, answers = self._drafted, ask_all(self.replicas, lambda replica: replica.info(), probe="info")[0]
            self._drafted = before | {url: info.get("drafted") for url, info in answers.items()}
            report.figures.update(drafts.figures(before, self._drafted))

    def _drop_connections(self) -> None:
        for replica in self.replicas:
            replica.close()

    def _generate_groups(self, prompt_ids: list[list[int]], stop: list[int], group: int | None = None) -> list[tuple]:
        """(token ids, log-probs, experts or None) of every completion."""
        group = group or self.config.rollout.group_size
        groups = self._generation(stop).groups(self._prompts(prompt_ids, group), group)
        return [_sample_facts(sample) for samples in groups for sample in samples]

    def _prompts(self, prompt_ids: list[list[int]], group: int) -> list[list[int]]:
        """Return the prompt of each group."""
        prompts = prompt_ids[::group]
        if any(prompt_ids[i] != prompts[i // group] for i in range(len(prompt_ids))):
            raise CheckFailed("the prompts of a group differ: the trainer's sampler no longer repeats each prompt.")
        return prompts

    def _all_episodes(self, rows: list[dict], stop: list[int], group: int) -> list[EpisodeResult]:
        """Results of an episode on each row."""
        with self._generation(stop).turns(group) as turns:
            return self.episodes.submit(rows, turns, stop).result()

    def _generation(self, stop: list[int]) -> Generation:
        """Requests of the version that the replicas serve; `stop` ends a completion."""
        at_once = [self._infos[replica.url]["max_num_seqs"] for replica in self.replicas]
        facts = self.config.rollout, self.run, self.sync.session, self.sync.served, stop
        cut = StopTexts(self.tokenizer, self.config.rollout.stop) if self._drafted else None
        return Generation(self.replicas, at_once, *facts, self.sync.recovery, cut)

    def _all_or_fail(self, call: Callable[[Replica], Any], what: str) -> None:
        asked, is_final = self.replicas, False
        while failed := ask_all(asked, call, probe=what)[1]:
            reasons = [f"the replica at {url} did not {what}: {one.text}" for url, one in failed.items()]
            error = ReplicasFailed(f"{'; '.join(reasons)}. {restart_hint(self.run, failed)}", failed)
            if self.sync.recovery is None:
                self._silent |= {url for url, error in failed.items() if error.status is None}
                raise error
            self.sync.recovery.bring_back(error, is_final)
            asked, is_final = [one for one in asked if one.url in failed], True


def _sample_facts(sample: Sample) -> tuple:
    """Return (token ids, log-probs, experts or None), which processes can send each other."""
    return sample.token_ids.tolist(), sample.logprobs.tolist(), sample.experts


def cache_dtype(info: Info) -> str:
    """A replica's KV cache as `server.kv_cache` names it; vLLM has other names for the same dtypes."""
    return {"fp8_e4m3": FP8, "bfloat16": MODEL_DTYPE}.get(info["kv_cache"], info["kv_cache"])


@contextlib.contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    """Set the block's wall-clock seconds under `phase`."""
    started = time.perf_counter()
    yield
    seconds[phase] = time.perf_counter() - started

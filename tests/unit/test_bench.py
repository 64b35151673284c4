"""The benchmarks of bench without their GPU: what they count, and that their levers are the configuration's."""

import argparse
import ast
import importlib.util
import json
import os
import sys
import types
from pathlib import Path

import pytest
import yaml

sys.path.insert(1, str(Path(__file__).parents[2] / "bench"))
sys.path.insert(1, str(Path(__file__).parents[2] / "bench/step"))

import bench_lengths
import bench_step
import bench_update
import decode_profile
from kernel_groups import group_of
from memory_child import SHAPES, parameters
from servers import Child, Failed, colocated_share, write_lengths
from step_table import efficiencies, figures, read_rows, table
from update_child import Batch
from workload import CONFIG, LEVERS, ROOT, WORKS, Work, linear_weights, step_flops, update_flops

from kit.core.config.load import load_config, to_dict


def test_what_measurements_import_of_the_kit_exists():
    """Most of these imports are made on a GPU only, in the middle of a measurement."""
    wanted = {}
    for folder in (ROOT / "bench", ROOT / "tests" / "evidence"):
        for file in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("kit.", "merge.", "eval.")):
                    wanted |= {(node.module, alias.name): file.name for alias in node.names}
    assert len(wanted) > 100
    missing = {
        (file, module, name)
        for (module, name), file in wanted.items()
        if not hasattr(importlib.import_module(module), name) and not is_module(f"{module}.{name}")
    }
    assert missing == set()


def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("lever", bench_step.VARIANTS)
def test_every_lever_is_made_of_configuration_keys(lever):
    keys = bench_step.levers(lever)
    config = load_config(str(ROOT / CONFIG), [f"--{key}={value}" for key, value in keys.items()])
    for key, value in keys.items():
        group, name = key.split(".")
        assert getattr(getattr(config, group), name) == yaml.safe_load(value), key


def test_a_variant_takes_keys_beside_levers():
    found = bench_step.levers("fp8+train.micro_batch_tokens=4096")
    assert found["policy.compute"] == "fp8" and found["train.micro_batch_tokens"] == "4096"
    assert found["train.recompute"] == "full" and bench_step.levers("default") == {}


def test_every_lever_of_the_update_has_a_bound():
    assert bench_update.BOUNDS.keys() == LEVERS.keys()


def test_the_operations_count_every_weight_of_a_linear_layer_twice():
    shape = SHAPES["8b"]
    embedding, norms = 151936 * 4096, 36 * (2 * 4096 + 2 * 128) + 4096
    assert linear_weights(shape) == parameters("8b") - embedding - norms
    assert update_flops(shape, 0) == 4 * linear_weights(shape)
    # Work A: 128 sequences of 1,274 tokens, update and reference; attention is 1,274 x 4,096 x 36 x 8 of each token.
    attention = WORKS["A"].tokens * 8 * 1274 * 4096 * 36
    assert step_flops(shape, WORKS["A"]) == WORKS["A"].tokens * 6 * linear_weights(shape) + attention


def test_lengths_of_work_b_are_as_announced():
    lengths = WORKS["B"].lengths
    assert lengths == WORKS["B"].lengths and len(lengths) == 128
    assert 300 < sorted(lengths)[64] < 520 and max(lengths) == 2048 and min(lengths) > 20


def test_a_ragged_batch_shares_its_prompt_and_pads_on_the_right():
    ids, mask = Batch.parse("8x64r").tensors("cpu")
    assert (ids[:, :8] == ids[0, :8]).all() and mask.sum(1).tolist() == Batch.parse("8x64r").lengths
    assert (mask.diff() <= 0).all() and mask[0].all() and not mask[7].all()


@pytest.mark.parametrize(
    ("kernel", "operator", "sizes", "group"),
    [
        ("nvjet_tst_128x256", "aten::mm", (16384, 4096), "base products"),
        ("nvjet_tst_128x256", "aten::mm", (16384, 16), "LoRA"),
        ("nvjet_tst_128x256", "aten::mm", (4096, 32768), "head"),
        ("sm90_xmma_gemm_e4m3bf16", "aten::_scaled_mm", (16384, 4096), "base products"),
        ("void flash_fwd_kernel<cutlass::bfloat16_t>", "aten::_flash_attention_forward", (8, 32), "attention"),
        ("_quantize_rows", "_Linear", (), "dequantization"),
        ("multi_tensor_apply_kernel", "aten::_fused_adamw_", (), "optimizer"),
        ("vectorized_elementwise_kernel", "aten::mul", (8, 2048), "norm, rope, activation"),
        ("Memset", "", (), "other"),
    ],
)
def test_kernels_are_grouped_by_what_they_compute(kernel, operator, sizes, group):
    assert group_of(kernel, operator, sizes, 16, {151936, 32768}) == group


def test_a_trace_is_read_as_the_cards_time_by_group(tmp_path):
    names = ["flash_fwd_splitkv", "cutlass_3x_gemm", "triton_red_fused_abs_amax_to_copy", "gumbel_sample", "memcpy32"]
    names.append("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(vllm::RankData*, vllm::RankSignals")
    begins = [0.0, 1000.0, 1500.0, 4000.0, 5000.0, 6000.0]  # us; the second and the third run together
    events = [{"cat": "kernel", "name": one, "ts": ts, "dur": 1000.0} for one, ts in zip(names, begins, strict=True)]
    events += [{"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 9e6}, {"ph": "M", "name": "process_name"}]
    file = tmp_path / "trace.json"
    file.write_text(json.dumps({"traceEvents": events}))
    found = decode_profile.kernels(file, 2)
    expected = ["attention", "products", "norm, activation, quantization", "sampling", "other", "between cards"]
    assert found["groups"] == dict.fromkeys(expected, 0.5)
    assert found["card"] == pytest.approx(2.75) and found["idle"] == pytest.approx(0.75)
    assert found["top"][0]["ms"] == 0.5 and found["top"][0]["calls"] == 0.5


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """`bench(*words)`: one call of bench_step.py as far as its options."""

    def make(*words: str) -> bench_step.Bench:
        argv = ["bench_step.py", "--work", str(tmp_path), "--out", str(tmp_path / "x.json"), *words]
        monkeypatch.setattr(sys, "argv", argv)
        return bench_step.Bench(bench_step.read_options())

    return make


def settings(flags: list[str]) -> dict:
    return to_dict(load_config(flags[1], flags[2:]))


@pytest.mark.parametrize(("variants", "urls"), [(["shared"], [8471]), (["shared", "shared+both"], [8470, 8471])])
def test_servers_are_on_both_cards_when_a_variant_needs_them_and_the_others_ask_the_second(bench, variants, urls):
    made = bench("--loads", "A", "C", "--variants", *variants)
    served, split = (settings(made.flags("x", made.largest, cards)) for cards in (None, [1]))
    assert served["rollout"]["server_urls"] == [f"http://127.0.0.1:{port}" for port in urls]
    assert served["server"]["gpus"] == [port - 8470 for port in urls]
    assert split["rollout"]["server_urls"] == ["http://127.0.0.1:8471"] and split["server"]["gpus"] == [1]
    # Every load fits the servers.
    assert served["rollout"]["max_completion_length"] == 4096 and served["server"]["max_num_seqs"] == 128
    each = 2 * 2 * 36 * 8 * 128
    assert served["server"]["kv_cache_gib"] * 2**30 > 1.1 * WORKS["C"].tokens * each > 1.1 * WORKS["A"].tokens * each


def test_one_card_is_enough_where_every_side_shares_it(bench):
    made = bench("--load", "A", "--stock_sides", "stock+one", "--variants", "default+one", "fp8+one")
    found = settings(made.flags("server", made.largest))
    assert found["rollout"]["server_urls"] == ["http://127.0.0.1:8470"] and found["server"]["gpus"] == [0]
    assert bench_step.stock_rows(made.options, True) == [("stock+one", "A")]
    assert not bench_step.stock_rows(made.options, False) and bench_step.replicas_of("fp8+one@A") == [0]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("", {}),
        ("+yield", {"CUDA_MPS_CLIENT_PRIORITY": "1"}),
        ("+sms=70", {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "70"}),
    ],
)
def test_a_trainer_beside_a_replica_asks_mps_for_what_its_variant_names(bench, monkeypatch, words, asked):
    variant, found = f"shared+one+overlap{words}", []
    made = bench("--load", "A", "--stock_sides", "--variants", variant, "--rehearse")
    monkeypatch.setattr(made, "wait_ours", lambda: None)
    monkeypatch.setattr(made, "steps_of", lambda *words, **more: found.append((words[1], more)))
    made.our_steps(variant, "A", 1, [0])
    [(flags, more)] = found
    assert {name: value for name, value in more.items() if "MPS" in name} == asked
    assert not [flag for flag in flags if str(flag).startswith(("--sms", "--yield"))]


def test_a_servers_memory_leaves_out_what_others_freed_since_the_call_began(bench, monkeypatch):
    made = bench("--load", "A", "--stock_sides", "stock+one", "--variants", "default+one")
    used = [30, 16, 47]  # GiB: another call's engine, without it, our server

    def memory(handle):
        made.watch.running = len(used) > 1
        return types.SimpleNamespace(used=used.pop(0) * 2**30, total=140 * 2**30)

    used.insert(0, 0)  # asked for the total
    card = {"nvmlInit": lambda: None, "nvmlDeviceGetCount": lambda: 1, "nvmlDeviceGetHandleByIndex": lambda n: n}
    monkeypatch.setitem(sys.modules, "pynvml", types.SimpleNamespace(**card, nvmlDeviceGetMemoryInfo=memory))
    made.watch.run()
    assert made.grown(0) == 31 and made.grown(1) is None


def test_a_variant_that_is_out_of_time_keeps_what_it_measured(tmp_path, monkeypatch):
    script = tmp_path / "child.py"
    lines = [f"print('FOUND {json.dumps({'rows': [*range(n)]})}', flush=True)" for n in (1, 2)]
    script.write_text("\n".join(["import time", *lines, "time.sleep(600)"]))
    monkeypatch.setattr(decode_profile, "__file__", str(script))
    monkeypatch.setattr(sys, "argv", ["decode_profile.py"])
    options = argparse.Namespace(out=tmp_path / "x.json", limit_s=2)
    children = decode_profile.Children()
    variant, found, missed, _ = children.run("fp8", options)
    assert variant == "fp8" and found == {"rows": [0, 1]} and missed.startswith("out of time after 2 s")
    children.end()
    assert children.run("fp8", options)[1:3] == (None, "not started")


def test_scaling_is_by_card(capsys):
    rows = [{"load": "A", "side": "2", "trainers": 2, "replicas": 2, "step": 1.0, "update_tok_s": 200.0}]
    rows.append(rows[0] | {"side": "4", "trainers": 4, "replicas": 3, "update_tok_s": 380.0})
    efficiencies([row | {"rollout_tok_s": 60.0} for row in rows])
    two, four = capsys.readouterr().out.splitlines()
    assert two == "A 2: update efficiency 100%, rollout efficiency 100%"
    assert four == "A 4: update efficiency 95%, rollout efficiency 67%"


def test_keys_of_ours_reach_the_server_and_every_row(bench):
    keys = ["server.kv_cache=fp8", "server.weights=bf16", "policy.quant_cfg=nvfp4a16"]
    made = bench("--load", "A", "--variants", "shared+overlap", "--ours", *keys)
    found = settings(made.flags("server", made.largest))
    assert (found["server"]["kv_cache"], found["server"]["weights"]) == ("fp8", "bf16")
    assert found["policy"]["quant_cfg"] == "nvfp4a16" and found["server"]["gpus"] == [1]
    with pytest.raises(SystemExit):
        bench("--ours", "server.kv_cache")


def test_a_row_in_a_format_has_servers_of_its_own_and_others_share_theirs(bench, monkeypatch):
    started, stopped = [], []

    class Server:
        is_ready = True

        def __init__(self, work, flags):
            started.append(settings(flags))

        def stop(self):
            stopped.append(len(started))

    monkeypatch.setattr(bench_step, "OurServer", Server)
    monkeypatch.setattr(bench_step.Bench, "our_steps", lambda *_: [])
    quantized = "liger+policy.quant_cfg=nvfp4a16+server.weights=bf16"
    made = bench("--load", "A", "--variants", "liger", "fp8", quantized, "--ours", "server.kv_cache=fp8", "--rehearse")
    made.serve(bench_step.served_keys(made.options.variants[0]))
    for variant in (*made.options.variants, "fp8"):
        made.run(variant, "A")
    formats = [(one["policy"]["quant_cfg"], one["server"]["weights"]) for one in started]
    assert formats == [(None, "fp8_per_channel"), ("nvfp4a16", "bf16"), (None, "fp8_per_channel")]
    assert stopped == [1, 2] and all(one["server"]["kv_cache"] == "fp8" for one in started)


def test_rows_are_compared_with_stock_of_the_same_load(capsys, tmp_path):
    load = WORKS["A"]
    step = {"number": 2, "generate": 1.0, "sync": 0.1, "logps": 1.0, "update": 2.0, "peak_gib": 8.0}
    step |= {"completion_tokens": sum(load.lengths)}
    row = {"server_gib": None, "card_gib": None}
    rows = []
    for name, side, seconds in (("A", "stock", 40), ("C", "stock", 60), ("A", "x", 10), ("C", "x", 20)):
        rows.append(row | {"load": name, "side": side} | figures([step | {"step": seconds}], load, SHAPES["8b"], 1))
    table(rows, None)
    told = capsys.readouterr().out
    assert [line.split()[2] for line in told.splitlines() if line.startswith("x ")] == ["4.00", "3.00"]
    three = figures([step | {"step": seconds} for seconds in (3, 9, 4)], load, SHAPES["8b"], 1)
    assert three["step"] == 4 and three["range"] == [3, 9] and "1 steps of 10.00 to 10.00 s" in told
    assert figures([step | {"step": 1}], load, SHAPES["8b"], 2)["mfu"] == rows[0]["mfu"] / 2
    table([rows[0] | {"side": "stock+one"}, rows[2]], None)  # the only one that ran
    alone = capsys.readouterr().out
    assert [line.split()[2] for line in alone.splitlines() if line.startswith("x ")] == ["4.00"]
    (tmp_path / "stock.json").write_text(json.dumps({"rows": rows[:2]}))
    table(rows[2:], tmp_path / "stock.json")
    again = capsys.readouterr().out
    assert [line.split()[2] for line in again.splitlines() if line.startswith("x ")] == ["4.00", "3.00"]


def test_sides_that_alternated_are_summed_up_over_their_rounds(capsys):
    load = WORKS["A"]
    step = {"number": 2, "generate": 1.0, "sync": 0.1, "logps": 1.0, "update": 2.0, "peak_gib": 8.0}
    step |= {"completion_tokens": sum(load.lengths)}
    row, rows = {"server_gib": None, "card_gib": None, "load": "A"}, []
    for stock_s, our_s in ((50, 11), (40, 30), (44, 10)):
        for side, seconds in (("stock", stock_s), ("x", our_s)):
            rows.append(row | {"side": side} | figures([step | {"step": seconds}], load, SHAPES["8b"], 1))
    rows.append(row | {"side": "x", "error": "out of memory"})
    table(rows, None)
    every, pooled = capsys.readouterr().out.split("work A, medians of the rounds\n")
    assert len([line for line in every.splitlines() if line.startswith("x ")]) == 4
    stock, ours = (line for line in pooled.splitlines() if line.startswith(("x ", "stock")))
    assert stock.split()[1:3] == ["44.00", "1.00"] and stock.endswith("3 steps of 40.00 to 50.00 s")
    assert ours.split()[1:3] == ["11.00", "4.00"] and ours.endswith("3 steps of 10.00 to 30.00 s")


def test_a_row_that_failed_says_what_the_recipe_said_not_what_its_launcher_did(tmp_path):
    code = "print('plan'); print('error: step 2: out of GPU memory'); print('=' * 60); raise SystemExit(1)"
    child = Child("ours", ["-c", code], tmp_path)
    with pytest.raises(Failed, match=r"^ours ended with 1: error: step 2: out of GPU memory$"):
        child.wait(60)


def test_an_overlapped_row_warms_up_one_step_longer(bench):
    made = bench("--loads", "A", "B", "--steps", "3", "2", "--variants", "shared")
    assert (made.steps("shared", "A"), made.steps("shared+overlap@A", "A")) == (4, 5)
    assert (made.steps("stock", "B"), made.steps("overlap", "B")) == (3, 4)


def test_stock_on_both_cards_comes_when_its_server_is_gone_and_a_side_may_be_for_some_works(bench):
    sides = ["stock", "stock+none", "stock+both", "stock+both+none+micro=2@BC"]
    options = bench("--loads", "A", "B", "--stock_sides", *sides).options
    assert bench_step.stock_rows(options, False) == [(side, load) for load in "AB" for side in sides[:2]]
    assert bench_step.stock_rows(options, True) == [("stock+both", "A"), ("stock+both", "B"), (sides[3], "B")]


def test_a_side_of_stock_is_made_of_its_settings(bench, capsys):
    assert bench_step.stock_settings("stock+both+none+micro=4+share=.3@B") == {
        "both": "",
        "none": "",
        "micro": "4",
        "share": ".3",
    }
    assert bench_step.stock_settings("stock") == {}
    for wrong in ("stock+fast", "ours", "stock+micro", "stock+none=3", "stock+micro=x"):
        with pytest.raises(SystemExit):
            bench("--stock_sides", wrong)
        assert "--stock_sides" in capsys.readouterr().err


def test_colocated_stock_gets_the_share_that_its_weights_and_completions_need():
    weights, shape = parameters("8b"), SHAPES["8b"]
    both = colocated_share(shape, weights, WORKS["A"], 2, 140.4)
    each = 2 * 2 * 36 * 8 * 128 * WORKS["A"].tokens / 2 / 2**30  # KV cache of 64 completions
    assert both * 140.4 > 2 * weights / 2**30 + 1.1 * each and both < 0.25
    assert colocated_share(shape, weights, WORKS["A"], 1, 140.4) > both
    assert colocated_share(shape, weights, WORKS["C"], 2, 140.4) > both
    assert colocated_share(shape, weights, WORKS["A"], 2, 79.6) > both * 1.7


def test_our_server_stays_beside_colocated_stock_only_where_both_fit(bench, monkeypatch):
    stopped = []
    made = bench("--load", "A", "--stock_sides", "stock+both", "--variants", "shared+both", "--rounds", "2")
    made.watch.totals, made.server_gib = [140.0, 140.0], {"ours": 37.0}
    server = type("Server", (), {"stop": lambda self: stopped.append(1)})
    monkeypatch.setattr(bench_step.time, "sleep", lambda _: None)
    for peak, stays in ((None, False), (90.0, True), (101.0, False)):
        made.servers["ours"], made.server_gib["ours"] = server(), 37.0
        made.peaks = {("stock+both", "A"): peak} if peak else {}
        made.make_room("stock+both", "A")
        assert ("ours" in made.servers) is stays, peak
    assert len(stopped) == 2


def test_sides_alternate_also_where_stock_is_colocated(bench, monkeypatch):
    made = bench("--load", "A", "--stock_sides", "stock+both", "--variants", "shared+both", "--rounds", "3")
    ran = []
    monkeypatch.setattr(bench_step.Bench, "prepare", lambda *_: None)
    monkeypatch.setattr(bench_step.Bench, "run", lambda self, side, load: ran.append(side))
    assert bench_step.compare(made) == 6 and ran == ["stock+both", "shared+both"] * 3


def test_a_line_that_is_being_written_is_not_read(tmp_path):
    log = tmp_path / "log"
    log.write_text('text\nROW {"number": 1}\nROW {"num')
    assert read_rows(log) == [{"number": 1}]


def test_a_step_with_other_prompts_or_completions_is_a_problem():
    load = WORKS["A"]
    step = dict.fromkeys(("step", "update", "logps", "peak_gib"), 1.0) | {"generate": 0.0}
    step |= {"completion_tokens": 128 * 1024, "prompt_tokens": 128 * 250}
    assert figures([step], load, SHAPES["8b"], 1)["problem"] is None
    for key in ("completion_tokens", "prompt_tokens"):
        problem = figures([step | {key: 7}], load, SHAPES["8b"], 1)["problem"]
        assert problem.startswith(f"[7] {key.replace('_', ' ')}"), problem


class FakeParent:
    """vLLM's ParentRequest as far as the plugin needs it."""

    def __init__(self, n: int, request_id: str = "cmpl-v1"):
        self.sampling_params = type("Params", (), {"n": n, "max_tokens": 9, "stop_token_ids": [1], "min_tokens": 0})()
        self.request_id = request_id

    def get_child_info(self, index: int) -> tuple:
        return f"{index}", self.sampling_params


@pytest.fixture
def parent(monkeypatch, tmp_path):
    """ParentRequest with the plugin, whose lengths are 1 to 4."""
    module = types.ModuleType("vllm.v1.engine.parallel_sampling")
    module.ParentRequest = type("ParentRequest", (FakeParent,), {})
    for name in ("vllm", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "lengths.json").write_text('{"first": [], "then": [1, 2, 3, 4]}')
    monkeypatch.setenv("BENCH_LENGTHS", str(tmp_path / "lengths.json"))
    bench_lengths.install()
    bench_lengths.install()
    return module.ParentRequest


def lengths_of(parent, count: int = 2) -> list[int]:
    return [parent.get_child_info(index)[1].max_tokens for index in range(count)]


def test_groups_take_turns_at_the_lengths_whatever_their_order(parent):
    one, other = parent(2), parent(2)
    calls = [(one, 0), (other, 0), (one, 1), (other, 1)]
    assert [who.get_child_info(index)[1].max_tokens for who, index in calls] == [1, 3, 2, 4]
    params = parent(2).get_child_info(0)[1]
    assert params.max_tokens == 1 and params.ignore_eos and params.stop_token_ids == []


def test_a_group_of_ours_has_its_own_place_on_whichever_replica(parent):
    ids = [f"3f2a-v{version}-{number}{end}" for version, number, end in ((0, 1, ""), (1, 2, "-9b1f"), (1, 3, ""))]
    assert [lengths_of(parent(2, one)) for one in ids] == [[3, 4], [1, 2], [3, 4]]
    assert lengths_of(parent(2)) == [1, 2], "others are counted apart"


def test_other_lengths_are_read_between_two_groups_and_begin_anew(parent, tmp_path):
    assert lengths_of(parent(2)) == [1, 2]
    write_lengths(tmp_path, Work(2, 7))
    os.utime(tmp_path / "lengths.json", ns=(1, 1))  # another time than before, however fast the machine
    assert lengths_of(parent(2)) == [7, 7]
    (tmp_path / "lengths.json").write_text('{"first": [], "then": [5, 6]}')
    assert lengths_of(parent(2)) == [5, 6]


def test_a_process_of_colocated_stock_samples_its_part_of_every_step(monkeypatch, tmp_path):
    given = []

    class Engine:
        def add_request(self, request_id, prompt, params, priority=0):
            given.append((params.max_tokens, params.ignore_eos, priority))

    module = types.ModuleType("vllm.v1.engine.llm_engine")
    module.LLMEngine = Engine
    monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "lengths.json").write_text('{"first": [1, 1, 2, 2], "then": [1, 2, 3, 4]}')
    bench_lengths.wrap_engine(bench_lengths.Lengths(str(tmp_path / "lengths.json")), 1, 2)
    params = FakeParent(1).sampling_params
    params.ignore_eos = False
    for number in range(6):
        Engine().add_request(str(number), [], params, priority=7)
    assert [one[0] for one in given] == [2, 2, 3, 4, 3, 4], "the second half, of the first step capped"
    assert all(one[1:] == (True, 7) for one in given) and (params.max_tokens, params.ignore_eos) == (9, False)


def test_the_steps_that_warm_up_can_be_short(parent, tmp_path):
    write_lengths(tmp_path, Work(4, 9), warm=1, warm_tokens=3)
    assert [lengths_of(parent(2)) for _ in range(5)] == [[3, 3], [3, 3], [9, 9], [9, 9], [9, 9]]
    ours = [f"3f2a-v{version}-{number}" for version, number in ((1, 16), (0, 17), (2, 1), (0, 16))]
    assert [lengths_of(parent(2, one)) for one in ours] == [[9, 9], [3, 3], [9, 9], [3, 3]]
    write_lengths(tmp_path, Work(4, 9), warm=1)
    os.utime(tmp_path / "lengths.json", ns=(1, 1))
    assert lengths_of(parent(2)) == [9, 9]


def test_our_server_starts_beside_stocks_only_where_vllm_would(bench):
    made = bench("--load", "A", "--variants", "both")
    made.watch.totals, made.watch.now = [140.0, 140.0], [0.0, 60.0]
    assert made.has_room
    made.watch.now = [0.0, 90.0]  # vLLM wants .4 of a card, 56 GiB, free at its start
    assert not made.has_room
    made.watch.totals = []
    assert made.has_room, "no card, no check"

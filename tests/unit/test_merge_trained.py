"""Runs that were trained for a format: what is written is what was trained, and anything else is refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.utils import helpers
from safetensors.torch import load_file, save_file

from kit.core.errors import BadInput, CheckFailed
from kit.core.formats import TRAINED
from kit.core.run_directory import RunDir, read_manifest, write_json
from kit.core.run_files import read_json
from kit.policy.quantized_linear import STATE, quantizers_off
from kit.weights.quantize import fake_quantize_activation
from merge import quantize
from merge.__main__ import main
from merge.merge import read_adapter, write_bf16
from merge.quantize import quantize_checkpoint
from merge.trained import find_trained
from merge.verify import Verifier, base_checkpoint, compare, divided_input_scales, fixed_batch, load_policy, log_probs
from tests.unit.merge_fixture import make_model, make_run, read_all, shared_folder, shared_run

# One layer that every format can store.
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 1}


def trained_run(name: str) -> RunDir:
    """Read-only: a BF16 run for format `name` with an adapter that moved the weights, made once a session."""
    folder, model = shared_folder() / f"trained-{name}", shared_folder() / "trained-model"
    if not model.exists():
        make_model(model, **SHAPE)
    return RunDir.open(folder) if folder.exists() else make_run(folder, model, "bfloat16", 0.01, quant_cfg=name)


class Export:
    """A trained run, its verifier, and checkpoints of it."""

    def __init__(self, name: str):
        from transformers import AutoTokenizer

        self.name, self.run = name, trained_run(name)
        self.base, self.adapter = base_checkpoint(self.run), self.run.newest_adapter()
        self.updates, self.trained = read_adapter(self.adapter, self.base), find_trained(self.run, self.adapter)
        batch = fixed_batch(self.run, AutoTokenizer.from_pretrained(self.base.directory), 320)[:6]
        self.verifier = Verifier(self.run, self.adapter, self.base, batch)

    def peaks(self, factor: float = 1.0) -> dict[str, float] | None:
        if not self.trained.format.needs_calibration:
            return None
        return {name: factor * peak for name, peak in self.trained.input_peaks(self.base.quantized).items()}

    def write(self, folder: Path, updates=None, peaks=None) -> Path:
        updates = self.updates if updates is None else updates
        write_bf16(self.base, updates, folder / "bf16", lambda _: {})
        source, peaks = folder / "bf16", peaks or self.peaks()
        quantize_checkpoint(source, folder / "own", self.name, self.base, updates, lambda _: None, input_peaks=peaks)
        return folder / "own"


@pytest.fixture(scope="module")
def exports():
    """`exports(format)`, each made once."""
    made: dict[str, Export] = {}
    return lambda name: made.get(name) or made.setdefault(name, Export(name))


@pytest.mark.parametrize("name", list(TRAINED))
def test_the_checkpoint_computes_what_the_policy_with_its_quantizers_does(exports, tmp_path, name):
    export = exports(name)
    verifier, place = export.verifier, export.write(tmp_path)
    found, plain = verifier.check_own("grpo", place), verifier.check_bf16("grpo", tmp_path / "bf16").mean_kl
    scores, without = verifier.scores["grpo"], verifier.plain["grpo"]
    off, update = compare(without, scores, verifier.batch).mean_kl, verifier.update_kl()
    read, bf16 = (verifier.compare("grpo", folder).mean_kl for folder in (place, tmp_path / "bf16"))
    print(  # the row of bench/CPU.md
        f"{name}: KL(policy‖it) {found.mean_kl:.1e}, read in float32 {read:.1e}, of the policy without quantizers "
        f"{off:.1e}; KL(policy‖bf16) {bf16:.1e}, of the policy without quantizers {plain:.1e}; KL(policy‖base) "
        f"{update:.1e}; {found.tokens} tokens"
    )
    assert found.mean_kl < 1e-8 and found.max_abs_dlogp < 1e-4 and found.top1_agreement == 1
    # Neither the quantizers nor the adapter could be left out without being seen; BF16 is the policy without them.
    assert off > 1e-3 and update > 1e-3 and plain < 2e-4


@pytest.mark.parametrize("name", ["fp8", "fp8_block"])
def test_input_scales_are_quotients_where_torch_multiplies_by_the_reciprocal(name, monkeypatch):
    def on_a_gpu(low, high, form, global_scale=None):
        peak = torch.maximum(low.abs(), high.abs())
        return peak * (1 / torch.full_like(peak, 448.0)), None  # how torch on a GPU divides by a Python number

    monkeypatch.setattr(helpers, "calculate_qparams", on_a_gpu)
    fmt = TRAINED[name].activation
    strategy = {"strategy": "token"} if fmt.per == "token" else {"strategy": "group", "group_size": fmt.group}
    form = QuantizationArgs(num_bits=8, type="float", symmetric=True, dynamic=True, **strategy)
    x = torch.randn(1, 4096, 256, generator=torch.Generator().manual_seed(0))
    policy = fake_quantize_activation(x, fmt)
    rows = x if fmt.per == "token" else x.unflatten(-1, (-1, fmt.group))

    def read() -> torch.Tensor:
        scale, _ = helpers.compute_dynamic_scales_and_zp(x, form, None)
        scale = scale.view(*rows.shape[:-1], 1)
        return ((rows / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale).view(x.shape)

    assert (read() != policy).any()
    with divided_input_scales():
        torch.testing.assert_close(read(), policy, rtol=0, atol=0)
    assert helpers.calculate_qparams is on_a_gpu


def scaled(folder: Path, suffix: str, factor: float) -> Path:
    """The checkpoint with the first tensor of that name's end multiplied."""
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        if name := min((name for name in tensors if name.endswith(suffix)), default=None):
            tensors[name] = (tensors[name].float() * factor).to(tensors[name].dtype)
            save_file(tensors, file, metadata={"format": "pt"})
            break
    return folder


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("nvfp4a16", lambda export, folder: export.write(folder, updates={})),
        ("nvfp4a16", lambda export, folder: scaled(export.write(folder), "o_proj.weight_global_scale", 0.5)),
        ("fp8", lambda export, folder: scaled(export.write(folder), "o_proj.weight_scale", 1.02)),
        ("fp8_static", lambda export, folder: export.write(folder, peaks=export.peaks(1.1))),
        ("nvfp4", lambda export, folder: export.write(folder, peaks=export.peaks(1.1))),
    ],
    ids=["adapter left out", "global scale", "one weight scale", "fp8 input ranges", "fp4 input ranges"],
)
def test_an_export_with_other_numbers_is_refused(exports, tmp_path, name, wrong):
    export = exports(name)
    with pytest.raises(CheckFailed, match="is not the policy: mean KL"):
        export.verifier.check_own("grpo", wrong(export, tmp_path))


@pytest.fixture
def copied(tmp_path):
    """`copied(format)`: a run of one's own."""
    return lambda name: RunDir(shutil.copytree(trained_run(name).path, tmp_path / name))


def manifest_of(run: RunDir, name: str) -> dict:
    return read_manifest(run.merged / "grpo" / name, "checkpoint", deep=True)


def test_a_merge_without_a_format_writes_that_of_the_training_with_its_ranges(copied, monkeypatch, capsys):
    for name in ("calibration_set", "input_peaks"):
        monkeypatch.setattr(f"merge.calibrated.{name}", lambda *_: pytest.fail("calibrated anew"))
    run = copied("nvfp4")
    assert main(["--run", str(run.path), "--policy", "grpo"]) == 0
    own, plain = manifest_of(run, "nvfp4"), manifest_of(run, "bf16")
    adapter = read_manifest(run.newest_adapter())
    assert own["trained_for"] == plain["trained_for"] == "nvfp4"
    assert own["quantizer_hash"] == own["calibration"]["quantizers"] == adapter["quantizer_hash"]
    assert (own["verify"]["policy_with"], plain["verify"]["policy_with"]) == ("quantizers of nvfp4", "no quantizers")
    assert own["verify"]["mean_kl"] < 1e-8 < plain["verify"]["mean_kl"]
    stored = read_all(run.merged / "grpo/nvfp4")
    state = load_file(run.newest_adapter() / STATE)
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"):
        assert stored[f"{module}.input_global_scale"].item() == pytest.approx(
            448 * 6 / state[f"{module}.input_amax"].item()
        )
    text = (run.merged / "grpo" / "nvfp4" / "README.md").read_text()
    assert "quantization-aware: the policy computed with the numbers of nvfp4, which is what this checkpoint" in text
    capsys.readouterr()

    # Another format of the same run: with the ranges that are there, and told apart.
    assert main(["--run", str(run.path), "--policy", "grpo", "--format", "fp8_static"]) == 0
    assert "MiB; the run was trained for nvfp4\n" in capsys.readouterr().out
    other = manifest_of(run, "fp8_static")
    assert (other["format"], other["trained_for"]) == ("fp8_static", "nvfp4")
    assert other["verify"]["mean_kl"] > 1e-2
    text = (run.merged / "grpo" / "fp8_static" / "README.md").read_text()
    assert "This checkpoint is fp8_static, which it was not trained for." in text


def test_a_merge_that_is_not_the_trained_policy_is_refused_and_leaves_nothing(copied, monkeypatch):
    write = quantize.WRITERS["nvfp4-pack-quantized"]

    def careless(fmt, weight, use, peak):
        return write(fmt, (weight.float() * 1.01).to(weight.dtype), use, 0.0)

    monkeypatch.setitem(quantize.WRITERS, "nvfp4-pack-quantized", careless)
    run = copied("nvfp4a16")
    with pytest.raises(CheckFailed, match="grpo checkpoint is not the policy"):
        main(["--run", str(run.path), "--policy", "grpo"])
    assert [place.name for place in (run.merged / "grpo").iterdir()] == ["bf16"]


def test_without_a_format_an_ordinary_run_is_asked_for_one():
    with pytest.raises(BadInput, match=r"--format is missing, and .* was not trained for one"):
        main(["--run", str(shared_run().path), "--dry_run"])


def test_policies_are_loaded_with_the_quantizers_that_the_run_directory_names(exports):
    run, ids = trained_run("nvfp4a16"), [torch.arange(1, 30)[None]]
    assert find_trained(shared_run(), shared_run().newest_adapter()) is None
    for adapter in (None, run.newest_adapter()):
        policy = load_policy(run, adapter)
        rounded = log_probs(policy, ids)[0]
        with quantizers_off(policy):
            assert (log_probs(policy, ids)[0] - rounded).abs().max() > 0.01


def change_manifest(directory: Path, **changes) -> None:
    values = {**read_json(directory / "manifest.json"), **changes}
    write_json(directory / "manifest.json", {key: value for key, value in values.items() if value is not None})


def test_quantizers_that_are_not_the_runs_are_bad_input(copied):
    run = copied("fp8_static")
    adapter = run.newest_adapter()
    change_manifest(adapter, quant_cfg="nvfp4")
    with pytest.raises(BadInput, match="has quantizers of format fp8_static, its manifest says nvfp4"):
        load_policy(run, adapter)
    change_manifest(adapter, quant_cfg=None)
    with pytest.raises(BadInput, match=r"was trained for fp8_static \(policy.quant_cfg\), and .* has no quantizers"):
        load_policy(run, adapter)


def test_ranges_of_other_layers_are_bad_input(copied):
    run = copied("fp8_static")
    trained, state = find_trained(run), load_file(run.newest_adapter() / STATE)
    state.pop(min(state))
    save_file(state, run.newest_adapter() / STATE, metadata={"quant_cfg": "fp8_static"})
    with pytest.raises(BadInput, match="have 6 input ranges, the base has 7 quantized layers"):
        trained.input_peaks(base_checkpoint(run).quantized)


def prepare_evaluation(run: RunDir) -> None:
    """Problems that are held out, and what an evaluation needs of a configuration."""
    held_out = [{"question": f"What is {a} minus {b}?", "answer": str(a - b)} for a in (40, 50) for b in (3, 4, 7)]
    (run.path / "heldout.jsonl").write_text("".join(json.dumps(row) + "\n" for row in held_out))
    config = read_json(run.config_file)["config"]
    config["data"]["eval_path"] = str(run.path / "heldout.jsonl")
    config["train"] = {"max_steps": 10}
    config["eval"] = {"max_new_tokens": 4, "bootstrap_samples": 100}
    write_json(run.config_file, {"config": config})


def test_an_evaluation_measures_the_policy_with_its_quantizers_and_gates_its_format(copied, capsys):
    from eval.gate import main as gate
    from eval.run import main as evaluate

    run = copied("nvfp4a16")
    prepare_evaluation(run)
    assert main(["--run", str(run.path)]) == 0
    assert evaluate(["--run", str(run.path)]) == 0
    result = read_json(run.eval_file)
    assert list(result["matrix"]["grpo"]) == ["nf4", "bf16", "nvfp4a16"]
    assert result["trained_for"] == result["matrix"]["base"]["nf4"]["quantizers"] == "nvfp4a16"
    assert result["conclusion"].startswith("The training was quantization-aware, for nvfp4a16: nf4 is the policy")

    def texts(name: str) -> list[str]:
        lines = (run.path / "eval" / f"grpo-{name}.jsonl").read_text().splitlines()
        return [json.loads(line)["completion"] for line in lines]

    assert texts("nf4") == texts("nvfp4a16") != texts("bf16")
    assert "| GRPO | nf4 (policy with the numbers of nvfp4a16) |" in (run.path / "eval.md").read_text()
    capsys.readouterr()
    assert gate(["--run", str(run.path)]) == 1  # a random model has no gain
    said = capsys.readouterr().out
    assert "grpo v10 in nvfp4a16" in said and "the training was quantization-aware, for nvfp4a16\n" in said
    line = next(line for line in said.splitlines() if line.startswith("KL("))
    assert line.split()[-2:] == ["0", "pass"]

    place = run.merged / "grpo" / "nvfp4a16"
    change_manifest(place, trained_for=None)
    with pytest.raises(BadInput, match="merged from other quantizers: its manifest says trained_for None"):
        gate(["--run", str(run.path)])
    change_manifest(place, trained_for="nvfp4a16")
    scaled(place, ".weight_global_scale", 0.5)
    with pytest.raises(BadInput, match=r"is not whole|is damaged"):
        gate(["--run", str(run.path)])


def test_quantizers_that_changed_since_they_were_written_are_bad_input(copied):
    run = copied("fp8_static")
    state = load_file(run.newest_adapter() / STATE)
    state[min(state)] *= 2  # of the same size
    save_file(state, run.newest_adapter() / STATE, metadata={"quant_cfg": "fp8_static"})
    with pytest.raises(BadInput, match="is damaged"):
        find_trained(run)

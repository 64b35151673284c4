"""What a rollout server's workers make of NF4 + adapter in a deployment format: what the exported checkpoint holds."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch

from kit.core.formats import TRAINED
from kit.rollout.server import adapter_check, quantized_fold
from kit.rollout.server.adapter_check import Refused, Room
from kit.rollout.server.remerge import Linear, Part, State, merged_weight, nf4_code
from merge.quantize import read_back, store
from tests.unit.fake_engine import CONFIG, adapter_tensors, write_adapter

CPU = torch.device("cpu")
# Keys are so much smaller than queries that their E4M3 scales under the global scale of both lose bits.
HEADS = {"q_proj": (256, 1.0), "k_proj": (128, 1e-5), "v_proj": (128, 0.3)}
COLUMNS = 512


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(rows, COLUMNS, generator=generator) * size for name, (rows, size) in HEADS.items()}
    for weight in found.values():  # so are a first worker's beside a second's
        weight[: len(weight) // 2] *= 1e-6
        weight[:, : COLUMNS // 2] *= 1e-6
    return found


def worker_layer(
    found: dict[str, torch.Tensor], rank: int = 0, ranks: int = 1, by_inputs: bool = False
) -> tuple[Linear, State, dict]:
    """A worker's fused layer of these weights with its NF4 copy, and an adapter: (linear, state, factors)."""
    from bitsandbytes.functional import quantize_4bit

    columns = COLUMNS // ranks if by_inputs else COLUMNS
    first_in = rank * columns if by_inputs else 0
    parts, packed, absmax, row, factors = [], [], [], 0, {}
    for number, (name, weight) in enumerate(found.items()):
        size = len(weight) if by_inputs else len(weight) // ranks
        first_out = 0 if by_inputs else rank * size
        parts.append(Part(name, row, size, first_out, first_in))
        row += size
        bytes_, state = quantize_4bit(weight.bfloat16(), quant_type="nf4", blocksize=64)
        rows, inputs = slice(first_out, first_out + size), slice(first_in, first_in + columns)
        packed.append(bytes_.view(len(weight), -1)[rows, first_in // 2 : (first_in + columns) // 2])
        absmax.append(state.absmax.view(len(weight), -1)[rows, first_in // 64 : (first_in + columns) // 64])
        generator = torch.Generator().manual_seed(number)
        a, b = torch.randn(4, COLUMNS, generator=generator), torch.randn(len(weight), 4, generator=generator)
        factors[name] = (a[:, inputs], (b * weight.std() * 0.05)[rows], 2.0)
    layer = SimpleNamespace(tp_size=ranks, input_size=COLUMNS, input_size_per_partition=columns)
    linear = Linear("qkv_proj", layer, row, columns, parts, torch.cat(packed).flatten(), torch.cat(absmax).flatten())
    return linear, State([linear], torch.bfloat16, nf4_code(CPU)), factors


def merged(linear: Linear, state: State, factors: dict) -> torch.Tensor:
    return merged_weight(linear, linear.packed, linear.absmax, state, factors)


def exported(name: str, found: dict[str, torch.Tensor]) -> torch.Tensor:
    """What readers of a checkpoint of this format compute with, layer below layer, float32."""
    peak = max(weight.abs().max().item() for weight in found.values()) if TRAINED[name].shares_peak else 0.0
    return torch.cat([read_back(TRAINED[name], weight, peak)[1] for weight in found.values()])


@pytest.mark.parametrize("name", TRAINED)
def test_a_fold_in_a_format_is_what_the_exported_checkpoint_holds(name):
    linear, state, factors = worker_layer(weights())
    weight = merged(linear, state, factors)
    expected = exported(name, dict(zip(HEADS, weight.split([rows for rows, _ in HEADS.values()]), strict=True)))
    served = quantized_fold.quantized(linear, weight, TRAINED[name], torch.bfloat16)
    if TRAINED[name].by_vllm:
        assert served.dtype == torch.float32 and torch.equal(served, expected)
    else:
        assert torch.equal(served, expected.bfloat16())
    assert not torch.equal(served.float(), weight.float()), "the format changes nothing here"
    # A trainer in float32 quantizes a BF16 weight too, as merging does.
    state.dtype = torch.float32
    exact = merged(linear, state, factors)
    rounded = exact.bfloat16()
    expected = exported(name, dict(zip(HEADS, rounded.split([rows for rows, _ in HEADS.values()]), strict=True)))
    assert not torch.equal(exact, rounded.float())
    assert torch.equal(quantized_fold.quantized(linear, exact, TRAINED[name], torch.float32), expected)


# Half of the keys are 64 rows, no whole block of fp8_block: refused, see below.
SPLITS = [
    (name, by_inputs) for name in TRAINED for by_inputs in (False, True) if (name, by_inputs) != ("fp8_block", False)
]


@pytest.mark.parametrize(("name", "by_inputs"), SPLITS)
def test_two_workers_hold_the_numbers_of_the_whole_weight(name, by_inputs, monkeypatch):
    found = weights()
    linear, state, factors = worker_layer(found)
    whole = quantized_fold.quantized(linear, merged(linear, state, factors), TRAINED[name], torch.bfloat16)
    barrier, told, shards = threading.Barrier(2), {}, {}

    def largest(peak: torch.Tensor) -> torch.Tensor:
        told[threading.current_thread().name] = peak
        barrier.wait(10)
        value = torch.maximum(told["0"], told["1"])
        barrier.wait(10)
        return value

    def work(rank: int) -> None:
        linear, state, factors = worker_layer(found, rank, 2, by_inputs)
        shards[rank] = quantized_fold.quantized(linear, merged(linear, state, factors), TRAINED[name], torch.bfloat16)

    monkeypatch.setattr(quantized_fold, "_largest", largest)
    threads = [threading.Thread(target=work, args=(rank,), name=str(rank)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if by_inputs:
        together = torch.cat([shards[0], shards[1]], dim=1)
    else:
        halves = [shards[rank].split([rows // 2 for rows, _ in HEADS.values()]) for rank in (0, 1)]
        together = torch.cat([part for pair in zip(*halves, strict=True) for part in pair])
    assert torch.equal(together, whole)


@pytest.mark.parametrize(
    ("name", "ranks", "by_inputs", "reason"),
    [
        ("fp8_block", 2, False, "k_proj has 64 outputs from 0 on here.*every 128"),
        ("w4a16", 8, True, "q_proj has 64 inputs from 0 on here.*every 128 of them. Lower server.tensor_parallel"),
        ("fp8", 2, False, "takes the FP8 scales of each shard for itself.*install vLLM 0.31"),
        (
            "nvfp4",
            1,
            False,
            "qkv_proj does not quantize its inputs.*kit.rollout.server.quantized_inputs.RemergeQuantizedInputs",
        ),
    ],
)
def test_a_worker_that_cannot_have_the_formats_numbers_says_why(name, ranks, by_inputs, reason, monkeypatch):
    monkeypatch.setattr(quantized_fold, "_vllm_compares_shards", lambda: False)
    with pytest.raises(ValueError, match=reason):
        quantized_fold.check([worker_layer(weights(), 0, ranks, by_inputs)[0]], TRAINED[name])


def test_a_shard_that_begins_within_a_block_is_refused():
    linear = worker_layer(weights())[0]
    quantized_fold.check([linear], TRAINED["fp8_block"])
    linear.parts[1].first_out = 64
    with pytest.raises(ValueError, match=r"k_proj has 128 outputs from 64 on here.*every 128"):
        quantized_fold.check([linear], TRAINED["fp8_block"])


@pytest.mark.parametrize("name", TRAINED)
def test_a_weight_quantized_some_rows_at_a_time_is_the_whole_weights(name, monkeypatch):
    linear, state, factors = worker_layer({"q_proj": weights()["q_proj"]})
    weight, fmt = merged(linear, state, factors), TRAINED[name]
    whole = quantized_fold.quantized(linear, weight, fmt, torch.bfloat16)
    monkeypatch.setattr(quantized_fold, "FOLD_CHUNK", 100 * COLUMNS)  # no whole number of blocks, nor of the rows
    assert torch.equal(quantized_fold.quantized(linear, weight, fmt, torch.bfloat16), whole)


def test_vllms_own_fp8_comes_to_the_exported_codes_and_scales():
    linear, state, factors = worker_layer({"o_proj": weights()["q_proj"]})
    weight = merged(linear, state, factors)
    served = quantized_fold.quantized(linear, weight, TRAINED["fp8"], torch.bfloat16)
    # vllm 0.31, layers/quantization/online/fp8.py: a float32 scale per channel, codes by true division.
    scale = served.abs().amax(1, keepdim=True) / 448.0
    codes = (served / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    stored = store(TRAINED["fp8"], weight, lambda *_: None)
    assert torch.equal(scale, stored["weight_scale"].float())
    assert torch.equal(codes.float(), stored["weight"].float())
    of_merged = weight.float().abs().amax(1, keepdim=True) / 448.0
    assert not torch.equal(of_merged, scale), "left alone it would have come to them too"


@pytest.mark.parametrize(
    ("quant_cfg", "quantization", "reason"),
    [
        ("nvfp4a16", "fp8_per_channel", "nvfp4a16 is served as bf16, the server was started as fp8_per_channel"),
        ("fp8", None, "fp8 is served as fp8_per_channel, the server was started as bf16"),
        ("int3", None, "the format 'int3', not one of fp8"),
    ],
)
def test_a_server_that_stores_weights_as_another_format_is_refused(quant_cfg, quantization, reason):
    started = SimpleNamespace(
        additional_config={"quant_cfg": quant_cfg}, model_config=SimpleNamespace(quantization=quantization)
    )
    with pytest.raises(ValueError, match=reason):
        quantized_fold.format_of(started)
    assert quantized_fold.format_of(SimpleNamespace(additional_config={}, model_config=None)) is None


def test_ranges_of_inputs_come_with_the_adapter_for_every_layer(tmp_path):
    from safetensors.torch import save_file

    linear, _, _ = worker_layer(weights())
    peaks = {"q_proj": 2.5, "k_proj": 2.5, "v_proj": 3.0}
    path = tmp_path / "adapter_model.safetensors"
    save_file({"x": torch.zeros(1)}, path, {"input_peaks": json.dumps(peaks)})
    assert quantized_fold.read_input_peaks(tmp_path, [linear]) == peaks
    linear.layer.input_peak = torch.zeros(())
    before = linear.layer.input_peak.data_ptr()
    quantized_fold.set_input_peak(linear, peaks)
    assert (linear.layer.input_peak.item(), linear.layer.input_peak.data_ptr()) == (3.0, before)
    layers = r"1 of 3 layers have no range of their inputs.*k_proj"
    for wrong, message in (
        ("NaN", "it has NaN"),
        ("Infinity", "it has Infinity"),
        ("1e999", "k_proj is inf, expected a number"),
        ("0.0", layers),
        ("-1.0", layers),
    ):
        text = json.dumps(peaks | {"k_proj": 7.5}).replace("7.5", wrong)
        save_file({"x": torch.zeros(1)}, path, {"input_peaks": text})
        with pytest.raises(ValueError, match=message):
            quantized_fold.read_input_peaks(tmp_path, [linear])


@pytest.mark.parametrize(("trained", "served"), [("nvfp4a16", None), (None, "nvfp4a16"), ("fp8", "nvfp4")])
def test_an_adapter_of_another_format_is_refused(tmp_path, trained, served):
    from safetensors.numpy import save_file

    folder = write_adapter(tmp_path / "adapter")
    path = folder / "adapter_model.safetensors"
    save_file(
        adapter_tensors(), path, {"adapter_config": json.dumps(CONFIG)} | ({"quant_cfg": trained} if trained else {})
    )
    adapter, room = adapter_check.read_adapter(folder), Room(None, {}, None, takes_patterns=True)
    adapter_check.check(adapter, room, trained)
    with pytest.raises(Refused, match=f"trained as {trained or 'the unq'}.*samples from {served or 'the unq'}"):
        adapter_check.check(adapter, room, served)

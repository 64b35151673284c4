"""Checkpoints that draft for a small Qwen3: its first layer as a draft model, and EAGLE heads of one layer.

A head's attention and MLP add nothing: its first projection alone maps hidden states (and for EAGLE the embedding of
the last token) to what the output layer reads. It is fitted to the base's own tokens, so that some drafts are
accepted.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

AUX_LAYERS = (0, 1, 2)  # hidden states that the EAGLE3 head reads, of a model of two layers
TEXTS, TOKENS, STEPS = 32, 32, 150


def write_draft_model(base: Path, out: Path) -> Path:
    """The base without its last layer."""
    facts = json.loads((base / "config.json").read_text())
    layers = facts["num_hidden_layers"] - 1
    weights = load_file(base / "model.safetensors")
    kept = {name: value for name, value in weights.items() if f"layers.{layers}." not in name}
    shutil.copytree(base, out, ignore=shutil.ignore_patterns("*.safetensors", "*.jsonl", "config.json"))
    _write(out, facts | {"num_hidden_layers": layers, "layer_types": facts["layer_types"][:layers]}, kept)
    return out


def write_head(base: Path, out: Path, method: str) -> Path:
    """A head for speculation `eagle` or `eagle3`."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32").eval()
    ids, states = _texts(base, model)
    if method == "eagle":
        inputs = torch.cat([model.model.embed_tokens(ids[:, 1:]), states[-1][:, :-1]], -1)
        architecture, wide = "LlamaForCausalLM", 1
    else:
        inputs = torch.cat([states[layer] for layer in AUX_LAYERS], -1)[:, :-1]
        architecture, wide = "LlamaForCausalLMEagle3", 2
    facts = model.config
    hidden, mlp = facts.hidden_size, facts.intermediate_size
    fc = _fit(inputs.detach(), states[-1][:, 1:], model.lm_head, normed=method == "eagle3")
    layer, ones, zeros = "layers.0.", torch.ones(hidden), torch.zeros
    weights = {"fc.weight": fc, f"{layer}post_attention_layernorm.weight": ones}
    heads = facts.num_attention_heads * facts.head_dim
    for name in "qkv":
        weights[f"{layer}self_attn.{name}_proj.weight"] = 0.02 * torch.randn(heads, wide * hidden)
    weights[f"{layer}self_attn.o_proj.weight"] = zeros(hidden, heads)
    weights[f"{layer}mlp.gate_proj.weight"] = weights[f"{layer}mlp.up_proj.weight"] = 0.02 * torch.randn(mlp, hidden)
    weights[f"{layer}mlp.down_proj.weight"] = zeros(hidden, mlp)
    if method == "eagle3":
        weights |= {f"{layer}{name}.weight": ones for name in ("hidden_norm", "input_layernorm")}
        weights |= {"norm.weight": ones, "lm_head.weight": model.lm_head.weight.detach()}
    made = {
        "architectures": [architecture],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": facts.num_attention_heads,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
    }
    keys = "hidden_size intermediate_size num_attention_heads head_dim vocab_size max_position_embeddings hidden_act"
    made |= {key: getattr(facts, key) for key in f"{keys} rms_norm_eps rope_parameters".split()}
    out.mkdir()
    _write(out, made, {name: value.clone() for name, value in weights.items()})
    return out


def _texts(base: Path, model: torch.nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Sampled answers to a problem (N, T), and the hidden states before each layer, after the last and normed."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    ask = [{"role": "user", "content": "Sam has 3 cards and buys 3 more. How many cards now?"}]
    prompt = tokenizer.apply_chat_template(ask, tokenize=False, add_generation_prompt=True)
    start = tokenizer([prompt] * TEXTS, add_special_tokens=False, return_tensors="pt")
    torch.manual_seed(0)
    last = []
    with torch.no_grad():
        ids = model.generate(**start, do_sample=True, max_new_tokens=TOKENS)
        model.model.norm.register_forward_pre_hook(lambda _, inputs: last.append(inputs[0]))
        *states, normed = model(ids, output_hidden_states=True).hidden_states
    return ids, [*states, *last, normed]


def _fit(inputs: torch.Tensor, wanted: torch.Tensor, head: torch.nn.Module, normed: bool) -> torch.Tensor:
    """A projection of `inputs` (N, T, I) from which `head` predicts what it predicts from `wanted` (N, T, H)."""
    torch.manual_seed(0)
    fc = torch.nn.Linear(inputs.shape[-1], wanted.shape[-1], bias=False)
    optimizer = torch.optim.Adam(fc.parameters(), 1e-2)
    with torch.no_grad():
        target = head(wanted).softmax(-1).flatten(0, 1)
    for _ in range(STEPS):
        made = fc(inputs)
        made = torch.nn.functional.rms_norm(made, made.shape[-1:]) if normed else made
        loss = torch.nn.functional.cross_entropy(head(made).flatten(0, 1), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return fc.weight.detach()


def _write(out: Path, facts: dict, weights: dict[str, torch.Tensor]) -> None:
    (out / "config.json").write_text(json.dumps(facts))
    whole = {name: value.contiguous() for name, value in weights.items()}
    save_file(whole, out / "model.safetensors", {"format": "pt"})

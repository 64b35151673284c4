"""Dimensions of a decoder: its layers' matrices, counted by kind of layer, and what a token or a sequence takes of
them. Imports no torch."""

from dataclasses import dataclass
from typing import NamedTuple

from kit.core.errors import BadInput


class Linear(NamedTuple):
    """A linear layer: its last name, inputs, outputs, and how many decoder layers have one."""

    name: str
    ins: int
    outs: int
    layers: int


@dataclass(frozen=True)
class Experts:
    """Routed experts of a mixture: `count` per layer, of which a token takes `taken`; in `layers` decoder layers.

    `intermediate` is the width of one, `shared` that of the expert that every token takes (0: none); `shared_gate`:
    a linear gate, one weight per hidden value, scales it (Qwen2-MoE).
    """

    count: int
    taken: int
    intermediate: int
    layers: int
    shared: int = 0
    shared_gate: bool = False

    def touched(self, tokens: float) -> float:
        """Expected number of experts of a layer that at least one of `tokens` takes, if all are equally likely."""
        return self.count * (1 - (1 - self.taken / self.count) ** tokens)


@dataclass(frozen=True)
class LinearAttention:
    """Gated delta rule of Qwen3.5 and Qwen3-Next, in `layers` decoder layers: instead of keys and values, a state of
    fixed size is cached.

    `fused`: queries, keys, values and the gate come from one linear layer (Qwen3-Next).
    """

    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool = False

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def mixed(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    def linears(self, hidden: int) -> list[Linear]:
        sizes = (
            {"in_proj_qkvz": self.mixed + self.value_size, "in_proj_ba": 2 * self.value_heads}
            if self.fused
            else {
                "in_proj_qkv": self.mixed,
                "in_proj_z": self.value_size,
                "in_proj_b": self.value_heads,
                "in_proj_a": self.value_heads,
            }
        )
        made = [Linear(name, hidden, outs, self.layers) for name, outs in sizes.items()]
        return [*made, Linear("out_proj", self.value_size, hidden, self.layers)]

    @property
    def other_weights(self) -> int:
        """Weights of one layer outside its linear layers: convolution, decay, norm."""
        return self.mixed * self.kernel + 2 * self.value_heads + self.value_dim


@dataclass(frozen=True)
class Shape:
    """Dimensions of a decoder. Activations are counted as those of a gated MLP.

    `intermediate` is the width of the MLP in layers without experts. `positions` is its longest context in tokens.
    `qk_norm`: query and key are normalized per head (Qwen3); `qkv_bias`: they have biases (Qwen2.5); `gated`: the MLP
    has a gate; `query_gate`: q_proj has a gate's outputs beside the queries (Qwen3.5); `norms`: hidden-size norms of a
    layer. `windowed` layers attend to `window` tokens. `vision`: weights of the part that reads images, which only a
    server holds, in 16 bits. `soft_cap`: attention scores are capped, which only
    eager attention computes; `skips_down`: recomputation leaves the MLP's last matmul out (`ENDS_WITH_RESIDUAL`).
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    positions: int
    qk_norm: bool = False
    qkv_bias: bool = False
    gated: bool = True
    query_gate: bool = False
    norms: int = 2
    window: int = 0
    windowed: int = 0
    experts: Experts | None = None
    linear_attention: LinearAttention | None = None
    vision: int = 0
    skips_down: bool = True
    soft_cap: bool = False

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_layers(self) -> int:
        """Layers with keys and values."""
        return self.layers - (self.linear_attention.layers if self.linear_attention else 0)

    @property
    def dense_layers(self) -> int:
        """Layers without routed experts."""
        return self.layers - (self.experts.layers if self.experts else 0)

    @property
    def mlp_width(self) -> int:
        """Width of the widest MLP that every token takes."""
        return max(self.intermediate * (self.dense_layers > 0), self.experts.shared if self.experts else 0)

    @property
    def linears(self) -> list[Linear]:
        """The linear layers, by name and size, without output layer, routed experts and their routers."""
        h, q, kv, several = self.hidden, self.q_size, self.kv_size, self.attention_layers
        sizes = {"q_proj": (h, q * (1 + self.query_gate)), "k_proj": (h, kv), "v_proj": (h, kv), "o_proj": (q, h)}
        found = [Linear(name, *size, several) for name, size in sizes.items()]
        if self.linear_attention:
            found += self.linear_attention.linears(h)
        found += self._mlp(self.intermediate, self.dense_layers)
        if self.experts and self.experts.shared:
            found += self._mlp(self.experts.shared, self.experts.layers)
        return [one for one in found if one.layers]

    def _mlp(self, width: int, layers: int) -> list[Linear]:
        ins = ["gate_proj"] * self.gated + ["up_proj"]
        return [Linear(name, self.hidden, width, layers) for name in ins] + [
            Linear("down_proj", width, self.hidden, layers)
        ]

    @property
    def expert_matrices(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of one expert's two parameters, as transformers fuses them: gate and up, and down."""
        if self.experts is None:
            return ()
        return (self.hidden, 2 * self.experts.intermediate), (self.experts.intermediate, self.hidden)

    @property
    def expert_weights(self) -> int:
        """Weights of one routed expert."""
        return sum(ins * outs for ins, outs in self.expert_matrices)

    @property
    def shared_weights(self) -> int:
        """Weights of linear layers that every token takes."""
        return sum(one.ins * one.outs * one.layers for one in self.linears)

    @property
    def linear_weights(self) -> int:
        """Weights of all linear layers except the output layer, and of experts: NF4, and FP8 on a server."""
        experts = self.experts.layers * self.experts.count * self.expert_weights if self.experts else 0
        return self.shared_weights + experts

    @property
    def active_weights(self) -> int:
        """The part of `linear_weights` that a token is multiplied with."""
        experts = self.experts.layers * self.experts.taken * self.expert_weights if self.experts else 0
        return self.shared_weights + experts

    def weights_read(self, tokens: float) -> float:
        """The part of `linear_weights` that at least one of `tokens` is expected to be multiplied with."""
        experts = self.experts.layers * self.experts.touched(tokens) * self.expert_weights if self.experts else 0
        return self.shared_weights + experts

    @property
    def other_weights(self) -> int:
        """Embedding, output layer, norms, biases and routers: they stay in 16 bits everywhere."""
        attention = (2 * self.head_dim if self.qk_norm else 0) + (
            self.q_size * (1 + self.query_gate) + 2 * self.kv_size if self.qkv_bias else 0
        )
        per_layer = self.layers * self.norms * self.hidden + self.attention_layers * attention
        if self.experts:
            per_layer += self.experts.layers * self.hidden * (self.experts.count + self.experts.shared_gate)
        if self.linear_attention:
            per_layer += self.linear_attention.layers * self.linear_attention.other_weights
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden + per_layer

    @property
    def parameters(self) -> int:
        return self.linear_weights + self.other_weights + self.vision

    @property
    def active_parameters(self) -> int:
        """Parameters that work on a token, embedding and output layer included."""
        return self.parameters - self.linear_weights + self.active_weights

    @property
    def largest_linear(self) -> int:
        """Weights of the largest linear layer."""
        return max(one.ins * one.outs for one in self.linears)

    def adapter_weights(self, rank: int, targets: str | list[str], expert_rank: int = 0) -> int:
        """Weights of a LoRA on `targets` (all-linear, or last names of linear layers), and of `expert_rank` on each
        routed expert."""
        chosen = self.targeted(targets)
        linear = sum(rank * (one.ins + one.outs) * one.layers for one in self.linears if one.name in chosen)
        return linear + (self.experts.layers * self.expert_adapter(expert_rank) if self.experts else 0)

    def expert_adapter(self, expert_rank: int) -> int:
        """Weights of a LoRA of this rank on all experts of one layer."""
        count = self.experts.count if self.experts else 0
        return sum(count * expert_rank * (ins + outs) for ins, outs in self.expert_matrices)

    def targeted(self, targets: str | list[str]) -> list[str]:
        """Names of the linear layers that get an adapter; raises `BadInput` if a name matches none."""
        known = list(dict.fromkeys(one.name for one in self.linears))
        if isinstance(targets, str):
            return known
        names = [name.rpartition(".")[2] for name in targets]
        if unknown := sorted(set(names) - set(known)):
            raise BadInput(f"policy.target_modules names {unknown[0]!r}; linear layers here are {', '.join(known)}.")
        return [name for name in known if name in names]

    def cached_bytes(self, tokens: float, width: int) -> float:
        """Bytes of a sequence of `tokens` in a KV cache with `width` bytes per value: all tokens in layers of full
        attention, the window's in others, and the states of linear attention, in 16 bits except for the rule's own,
        which is float32."""
        full = self.attention_layers - self.windowed
        kept = full * tokens + self.windowed * min(tokens, self.window)
        found = 2 * self.kv_size * width * kept
        if (one := self.linear_attention) is not None:
            state = 4 * one.value_heads * one.key_dim * one.value_dim + 2 * one.mixed * (one.kernel - 1)
            found += one.layers * state
        return found

    def attended_share(self, tokens: float) -> float:
        """Query-key pairs of a causal sequence of `tokens`, as a share of those with full attention in all layers."""
        if not tokens:
            return 1.0
        window = min(tokens, self.window)
        inside = (2 * window * tokens - window**2) / tokens**2 if self.windowed else 0.0
        return (self.attention_layers - self.windowed + self.windowed * inside) / self.layers

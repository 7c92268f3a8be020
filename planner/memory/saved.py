"""What autograd keeps of one transformer block until its backward, tensor by tensor, as transformers 5 implements it.

Every figure was read off a saved-tensors trace of the real modules (`tests/memory/saved_tensors.py` takes it) and
follows from how the code is written, not from a textbook constant:

* LayerNorm keeps its input and two statistics; transformers' RMSNorm also keeps the normalised copy, and computes in
  fp32.
* A linear layer keeps its input in the compute dtype. Under autocast every linear casts its own copy of an fp32 input,
  so separate q, k and v projections keep three; in a pure 16-bit model they share one.
* Flash-like attention keeps q, k, v, the output and a log-sum-exp; eager attention keeps the probabilities (fp32, and
  once more in the compute dtype), with keys and values repeated to all heads. Where no fused kernel takes the call,
  torch's own form of scaled_dot_product_attention keeps the probabilities too, and all it reads in fp32.
* Activations: ReLU keeps its output only, a fused GELU or SiLU its input, tanh-GELUs written in Python five
  intermediates, the quick GELU two.
* Dropout keeps a mask: one byte per element on a GPU, the tensor's own dtype on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.memory.recipe import Recipe
from planner.models.facts import ModelFacts

FP32_SCALED_NORM = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "olmo2"})
# Their eager softmax runs in the dtype of the scores; the others ask for fp32.
SOFTMAX_IN_SCORE_DTYPE = frozenset(
    {
        "bert",
        "roberta",
        "xlm-roberta",
        "electra",
        "albert",
        "distilbert",
        "bart",
        "mbart",
        "pegasus",
        "m2m_100",
        "whisper",
        "gpt_oss",
        "gpt2",
        "falcon",
        "t5",
        "mt5",
    }
)
FP32_SCORES = frozenset({"gptj", "codegen"})
# Rotated queries made by concatenation are laid out head by head, so the attention's output is copied once more.
CONCATENATED_ROTARY = frozenset({"phi", "phi3", "gpt_neox", "stablelm", "glm"})
HEADS_FIRST = CONCATENATED_ROTARY | {"whisper"}  # whisper asks for contiguous heads itself
T5_FAMILY = frozenset({"t5", "mt5"})
IMAGE_TOWER = "siglip_vision_model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A stack of equal blocks seen by `tokens` tokens in samples of `length`; `memory_tokens` is what cross-attention
    reads.

    Widths are per device (already divided by tp).
    """

    layers: int
    tokens: int
    length: int
    hidden: int
    query: int
    key_value: int
    heads: int
    intermediate: int
    is_decoder: bool = False
    memory_tokens: int = 0
    memory_length: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How an implementation behaves, resolved once from facts, recipe, attention kind and device.

    `eager`: attention written out in Python; `unfused`: torch's scaled_dot_product_attention without a fused kernel;
    `takes_masks`: the same with one, which is told of a sliding window by a mask (flash attention by a number).
    """

    facts: ModelFacts
    recipe: Recipe
    eager: bool
    on_cpu: bool
    unfused: bool = False
    takes_masks: bool = False

    @property
    def mask_bytes(self) -> int:
        """Bytes per element of a dropout mask."""
        return self.recipe.compute if self.on_cpu else 1

    @property
    def compute(self) -> int:
        return self.recipe.compute

    @property
    def fp32_softmax(self) -> bool:
        """Whether eager attention's softmax runs in fp32: where the code asks for it, or autocast does.

        On a CPU autocast leaves softmax alone, but a causal mask, or T5's bias, is fp32 and so are the masked scores.
        """
        causal = self.facts.kind not in ("encoder", "vision", "vision-text")
        raised = self.recipe.autocast and (causal or not self.on_cpu)
        return raised or self.facts.model_type not in SOFTMAX_IN_SCORE_DTYPE

    def norm_bytes(self) -> int:
        """Bytes per element that a norm keeps besides its output."""
        if self.facts.model_type == "cohere":
            return 12  # LayerNorm in Python: the centred input twice and the normalised copy, fp32
        if self.facts.norm != "rmsnorm":
            return self.recipe.residual
        if self.recipe.residual == 4 or self.facts.model_type in FP32_SCALED_NORM:
            return 8
        if self.facts.model_type in T5_FAMILY:
            return 4 + 2 * self.compute  # the variance's fp32 copy, the input, the normalised copy
        return 4 + self.compute

    def linear_inputs(self, consumers: int) -> int:
        """Bytes per element of the input that `consumers` linear layers share."""
        return self.compute * (consumers if self.recipe.autocast else 1)


def block_bytes(rules: Rules, stack: Stack) -> float:
    """Bytes that one block keeps for backward on one device."""
    facts = rules.facts
    attention = _attention(rules, stack, stack.tokens, stack.length)
    blocks_norms = _norms(rules, stack)
    mlp = _moe(rules, stack) if facts.is_moe else _mlp(rules, stack.tokens, stack.intermediate)
    cross = 0.0
    if stack.is_decoder and stack.memory_tokens:
        cross = _attention(rules, stack, stack.memory_tokens, stack.memory_length)
        cross += stack.tokens * stack.hidden * (rules.norm_bytes() + rules.linear_inputs(1))
        cross += stack.memory_tokens * stack.hidden * (rules.linear_inputs(2) if rules.recipe.autocast else 0)
    return blocks_norms + attention + mlp + cross + _dropout(rules, stack)


def _norms(rules: Rules, stack: Stack) -> float:
    """Norms and the inputs of the linear layers that follow them."""
    facts = rules.facts
    element = stack.tokens * stack.hidden
    qkv = 1 if facts.fused_qkv else 3
    gates = 2 if facts.gated_mlp and not facts.fused_gate_up else 1
    norms = 1 if facts.parallel_residual and facts.norms_per_layer == 1 else max(facts.norms_per_layer, 2)
    inputs = norms
    if facts.parallel_residual and norms == 2 and facts.norm != "rmsnorm":
        inputs = 1  # both norms read the same residual
    kept = inputs * rules.norm_bytes()
    if facts.is_moe and rules.recipe.autocast:
        gates = 1  # the router casts; the experts' kernels run in fp32 (see _moe)
    if norms == 1 and rules.recipe.autocast:
        kept += rules.linear_inputs(qkv + gates)
    elif norms == 1:
        kept += rules.compute
    else:
        kept += rules.linear_inputs(qkv) + rules.linear_inputs(gates)
    total = element * kept
    if facts.layer_scale:
        total += 2 * element * rules.compute
    if facts.qk_norm and facts.qk_norm != "per_head_layernorm":
        total += stack.tokens * (stack.query + stack.key_value) * _qk_norm_bytes(rules)
    return total


def _qk_norm_bytes(rules: Rules) -> int:
    if rules.facts.qk_norm == "full_projection" or rules.facts.model_type in FP32_SCALED_NORM:
        return 8
    return 4 + rules.compute


def _attention(rules: Rules, stack: Stack, key_tokens: int, key_length: int) -> float:
    """Projections, the attention itself and the input of the output projection."""
    facts, compute = rules.facts, rules.compute
    query = stack.tokens * stack.query * compute
    keys = key_tokens * stack.key_value * compute
    rotary_over_fused = facts.position_type == "rope" and facts.fused_qkv
    output = query
    pairs = stack.tokens * key_length * stack.heads
    if rules.unfused:
        read = stack.query * (stack.tokens + 2 * key_tokens) * 4
        return read + output + pairs * _unfused_bytes(rules)
    if rules.eager:
        repeated_keys = key_tokens * stack.query * compute
        upcast = stack.query * (stack.tokens + key_tokens) * (4 - compute) if facts.model_type in FP32_SCORES else 0
        if rules.recipe.autocast:
            upcast = 0
        return query + 2 * repeated_keys + output + upcast + pairs * _probability_bytes(rules)
    log_sum_exp = stack.tokens * stack.heads * 4
    rotated = query + keys if rotary_over_fused else 0  # copies of q and k beside the fused projection
    copied = query if facts.model_type in HEADS_FIRST else 0
    # T5's position bias, with the padding mask in it, is a mask of every pair of positions of every sample and head.
    bias = pairs * compute if facts.model_type in T5_FAMILY else 0
    mask = stack.tokens * key_length * compute + 2 * key_tokens * (stack.query - stack.key_value) * compute
    masks = mask * _masked_share(rules, key_length)
    return query + 2 * keys + rotated + output + copied + log_sum_exp + bias + masks


def _masked_share(rules: Rules, length: int) -> float:
    """Share of layers that keep a mask of their own: torch turns booleans into numbers at every call, and transformers
    repeats keys and values to all heads beside a mask. Windows need one, and images that attend in both directions."""
    facts = rules.facts
    if not rules.takes_masks:
        return 0.0
    if facts.kind == "vision-language" and facts.model_type != IMAGE_TOWER:
        return 1.0
    return facts.window_share if 0 < facts.sliding_window < length else 0.0


def _unfused_bytes(rules: Rules) -> int:
    """Bytes per query-key pair: fp32 probabilities, with dropout its mask and the product of both."""
    return 4 + (rules.mask_bytes + 4 if rules.facts.attention_dropout > 0 else 0)


def _probability_bytes(rules: Rules) -> int:
    """Bytes per query-key pair that eager attention keeps: probabilities, their copy for the product, dropout, soft
    cap."""
    facts, compute = rules.facts, rules.compute
    kept = 4 + compute if rules.fp32_softmax and compute == 2 else compute
    if facts.attention_dropout > 0:
        kept += rules.mask_bytes + compute
    return kept + (compute if facts.attn_logit_softcapping else 0)


def _mlp(rules: Rules, tokens: int, width: int) -> float:
    """The feed-forward part, without its first linear's input."""
    return tokens * width * rules.compute * _copies(rules.facts)


def _copies(facts: ModelFacts) -> int:
    """Tensors of the MLP's width that one feed-forward keeps."""
    if facts.gated_mlp:  # gpt-oss clamps both halves and writes its gate out as well
        return 7 if facts.composite_activation or facts.model_type == "gpt_oss" else 4
    if facts.activation == "relu":
        return 1
    if facts.activation == "quick_gelu":
        return 3
    return 5 if facts.composite_activation else 2


def _moe(rules: Rules, stack: Stack) -> float:
    """Routed experts on the permuted tokens, shared experts on all; grouped matrix products are not autocast."""
    facts = rules.facts
    width = facts.moe_intermediate_size or stack.intermediate
    element = 4 if rules.recipe.autocast else rules.compute
    routed = stack.tokens * facts.experts_per_token * (2 * stack.hidden + _copies(facts) * width) * element
    router = stack.tokens * facts.num_experts * 4 + stack.tokens * facts.experts_per_token * (3 * 8 + 8 + 4)
    shared_width = facts.shared_expert_intermediate_size or facts.num_shared_experts * width
    shared = _mlp(rules, stack.tokens, shared_width) if shared_width else 0.0
    if shared_width and rules.recipe.autocast:
        shared += stack.tokens * stack.hidden * rules.compute * (3 if facts.shared_expert_gate else 2)
    if facts.shared_expert_gate:
        shared += stack.tokens * stack.hidden * rules.compute
    return routed + router + shared


def _dropout(rules: Rules, stack: Stack) -> float:
    if rules.facts.hidden_dropout <= 0:
        return 0.0
    count = 3 if stack.is_decoder and stack.memory_tokens else 2
    kept = count * stack.tokens * stack.hidden * rules.mask_bytes
    if rules.facts.model_type in T5_FAMILY:  # dropout between the two products: a mask, and its output beside ReLU's
        kept += stack.tokens * stack.intermediate * (rules.mask_bytes + rules.compute)
    return kept


def selective_bytes(rules: Rules, stack: Stack) -> float:
    """Bytes kept under selective checkpointing: the block's input and the outputs of matrix products and attention."""
    facts, compute = rules.facts, rules.compute
    gates = 2 if facts.gated_mlp else 1
    projections = stack.query + 2 * stack.key_value + stack.query + stack.hidden
    width = stack.intermediate
    if facts.is_moe:
        width = facts.experts_per_token * (facts.moe_intermediate_size or width)
    kept = projections + gates * width + stack.hidden
    return stack.tokens * (kept * compute + stack.hidden * rules.recipe.residual + stack.heads * 4)


def working_bytes(rules: Rules, stack: Stack) -> float:
    """Gradients alive inside one block's backward, beyond what the block keeps: the widest tensors of the MLP, or those
    of attention, by whose turn the MLP has let go of what it kept; and the residual's."""
    facts, compute = rules.facts, rules.compute
    # The gradient behind the activation, and those before it, less the input of the last product, which is done with.
    alive = (3 if facts.gated_mlp else 2) - (0 if facts.composite_activation else 1)
    width = stack.intermediate
    if facts.is_moe:
        width = facts.experts_per_token * (facts.moe_intermediate_size or width)
    mlp = stack.tokens * width * alive * compute
    attention = stack.tokens * (2 * stack.query + 2 * stack.key_value) * compute
    attention += stack.tokens * max(stack.length, stack.memory_length) * stack.heads * _score_gradient_bytes(rules)
    if facts.model_type in T5_FAMILY:  # the shared bias's gradient and its sum over layers, once for all samples
        attention += 2 * stack.length * max(stack.length, stack.memory_length) * stack.heads * rules.recipe.residual
    let_go = _moe(rules, stack) if facts.is_moe else _mlp(rules, stack.tokens, stack.intermediate)
    return max(mlp, attention - let_go) + 2 * stack.tokens * stack.hidden * rules.recipe.residual


def _score_gradient_bytes(rules: Rules) -> int:
    """Bytes per query-key pair of the gradients on both sides of the softmax, or of T5's bias."""
    if rules.unfused:
        return 8
    if rules.eager:
        return (4 if rules.fp32_softmax else rules.compute) + rules.compute
    return rules.compute if rules.facts.model_type in T5_FAMILY else 0

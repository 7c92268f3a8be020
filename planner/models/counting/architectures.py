"""Parameter counts by kind of model: decoders, encoders, both together, and models that see images."""

from __future__ import annotations

from dataclasses import replace

from planner.models.counting.weights import (
    NOTHING,
    Weights,
    attention,
    block_count,
    count_weights,
    linear,
    mlp,
    norm,
    norms,
    routed_experts,
    router_and_shared,
    tensor,
    vector,
)
from planner.models.facts import BlockCount, ModelFacts, ParameterCounts, TowerFacts


def count_decoder(facts: ModelFacts) -> ParameterCounts:
    """Return the counts of a decoder with its language-model head."""
    final_norm = norm(facts, name="final_norm") if facts.final_norm else NOTHING
    return count_weights(
        embedding=_decoder_embedding(facts),
        blocks=decoder_blocks(facts),
        head=_decoder_head(facts),
        other=final_norm + _projection_out(facts),
    )


def decoder_blocks(facts: ModelFacts) -> tuple[BlockCount, ...]:
    """Return the stack of layers; leading dense layers of a mixture of experts come first."""
    common = attention(facts) + norms(facts, facts.norms_per_layer)
    dense = common + mlp(facts, facts.intermediate_size)
    if not facts.is_moe:
        return (block_count("decoder", facts.num_layers, dense),)
    experts = routed_experts(facts)
    sparse = common + experts + router_and_shared(facts)
    moe = block_count("moe", facts.num_layers - facts.first_k_dense, sparse, experts.total)
    return (block_count("dense", facts.first_k_dense, dense), moe) if facts.first_k_dense else (moe,)


def _decoder_embedding(facts: ModelFacts) -> Weights:
    width = facts.word_embed_proj_dim or facts.hidden_size
    tokens = tensor(facts.vocab_size, width, name="tokens.weight")
    if facts.learned_positions:
        positions = facts.max_position_embeddings + facts.position_offset
        tokens += tensor(positions, facts.hidden_size, name="positions.weight")
    if width != facts.hidden_size:
        tokens += tensor(facts.hidden_size, width, name="project_in.weight")
    return tokens + norm(facts, name="embedding_norm") if facts.embedding_layernorm else tokens


def _projection_out(facts: ModelFacts) -> Weights:
    """OPT-350m projects back to the embedding's width before the head."""
    width = facts.word_embed_proj_dim or facts.hidden_size
    return NOTHING if width == facts.hidden_size else tensor(width, facts.hidden_size, name="project_out.weight")


def is_bare(facts: ModelFacts) -> bool:
    """Return whether the class is the stack without a head (`LlamaModel`); ChatGLM's class of that name has a head."""
    return facts.architecture.endswith("Model") and not facts.architecture.endswith(("LMHeadModel", "ChatGLMModel"))


def _decoder_head(facts: ModelFacts) -> Weights:
    if is_bare(facts):
        return NOTHING
    if facts.architecture.endswith("ForSequenceClassification"):
        return tensor(facts.num_labels, facts.hidden_size, name="classifier.weight")
    width = facts.word_embed_proj_dim or facts.hidden_size
    untied = NOTHING if facts.tie_word_embeddings else tensor(facts.vocab_size, width, name="head.weight")
    return untied + (vector(facts.vocab_size, "head.bias") if facts.lm_head_bias else NOTHING)


def count_encoder(facts: ModelFacts) -> ParameterCounts:
    """Return the counts of an encoder with the head that its architecture's name says (`ForMaskedLM`).

    ALBERT's pooler belongs to `AlbertModel`; `AlbertForMaskedLM`, which the catalogue names, is built without it.
    """
    return count_weights(
        embedding=_encoder_embedding(facts),
        blocks=_encoder_blocks(facts),
        head=_encoder_head(facts),
        other=_encoder_relative_positions(facts) + _pooler(facts) + _final_norm(facts),
    )


def _encoder_embedding(facts: ModelFacts) -> Weights:
    width = facts.embedding_size or facts.hidden_size
    tables = tensor(facts.vocab_size, width, name="tokens.weight")
    if facts.type_vocab_size:
        tables += tensor(facts.type_vocab_size, width, name="types.weight")
    if facts.learned_positions:
        tables += tensor(facts.max_position_embeddings, width, name="positions.weight")
    if facts.embedding_layernorm:
        tables += norm(facts, width, "embedding_norm")
    # ALBERT maps from the embedding's width to the hidden width even where they are equal, ELECTRA does not.
    if facts.shared_layers or width != facts.hidden_size:
        tables += linear(width, facts.hidden_size, "project_in", bias=True)
    return tables


def _encoder_blocks(facts: ModelFacts) -> tuple[BlockCount, ...]:
    block = attention(facts) + mlp(facts, facts.intermediate_size) + norms(facts, facts.norms_per_layer)
    if facts.position_buckets and not facts.share_att_key:
        width = facts.hidden_size
        block += linear(width, width, "key_positions", bias=True) + linear(width, width, "query_positions", bias=True)
    repeats = 1 if facts.shared_layers else facts.num_layers
    if facts.model_type != "modernbert":
        return (block_count("encoder", repeats, block),)
    # ModernBERT's first layer has no norm before its attention: the embeddings were normalised just before.
    first = attention(facts) + mlp(facts, facts.intermediate_size) + norms(facts, facts.norms_per_layer - 1)
    return (block_count("encoder", 1, first), block_count("encoder", facts.num_layers - 1, block))


def _encoder_relative_positions(facts: ModelFacts) -> Weights:
    """DeBERTa's table of relative positions [2 * buckets, hidden] and its norm."""
    if not facts.position_buckets:
        return NOTHING
    table = tensor(2 * facts.position_buckets, facts.hidden_size, name="relative_positions.weight")
    return table + norm(facts, name="relative_positions_norm")


def _pooler(facts: ModelFacts) -> Weights:
    return linear(facts.hidden_size, facts.hidden_size, "pooler", bias=True) if facts.pooler else NOTHING


def _final_norm(facts: ModelFacts) -> Weights:
    return norm(facts, name="final_norm") if facts.model_type == "modernbert" else NOTHING


def _encoder_head(facts: ModelFacts) -> Weights:
    built = facts.architecture
    if built.endswith("ForMaskedLM"):
        return _masked_lm_head(facts)
    if built.endswith("ForPreTraining"):
        return _pretraining_head(facts)
    if built.endswith("ForSequenceClassification"):
        return _dense(facts) + linear(facts.hidden_size, facts.num_labels, "classifier", bias=True)
    if built.endswith(("ForTokenClassification", "ForQuestionAnswering")):
        dense = _dense(facts) if facts.model_type == "modernbert" else NOTHING
        return dense + linear(facts.hidden_size, facts.num_labels, "classifier", bias=True)
    return NOTHING


def _masked_lm_head(facts: ModelFacts) -> Weights:
    """Return a projection to the embedding's width, its norm, and the bias of the decoder tied to the embedding."""
    width = facts.embedding_size or facts.hidden_size
    head = linear(facts.hidden_size, width, "head_dense", bias=facts.norm_bias) + norm(facts, width, "head_norm")
    if not facts.tie_word_embeddings:
        head += tensor(facts.vocab_size, width, name="head.weight")
    return head + vector(facts.vocab_size, "head.bias") if facts.lm_head_bias else head


def _pretraining_head(facts: ModelFacts) -> Weights:
    """ELECTRA's discriminator; for BERT and ALBERT the masked-LM head, a pooler and the sentence-order classifier."""
    dense = linear(facts.hidden_size, facts.hidden_size, "pretraining_dense", bias=True)
    if facts.model_type == "electra":
        return dense + linear(facts.hidden_size, 1, "classifier", bias=True)
    return _masked_lm_head(facts) + dense + linear(facts.hidden_size, 2, "classifier", bias=True)


def _dense(facts: ModelFacts) -> Weights:
    """Return the layer before a classifier (BERT calls it the pooler); ModernBERT's has a norm and no bias."""
    dense = linear(facts.hidden_size, facts.hidden_size, "classifier_dense", bias=facts.norm_bias)
    return dense + norm(facts, name="classifier_norm") if facts.model_type == "modernbert" else dense


def count_encoder_decoder(facts: ModelFacts) -> ParameterCounts:
    """Both stacks, the shared token table, and an untied head where there is one.

    T5 and mT5: `tie_word_embeddings` false means that the published checkpoint stores a head of its own (flan-t5,
    mT5). A model that transformers 5 builds from such a config is tied all the same, but `from_pretrained` finds two
    different tensors in the checkpoint and keeps both; so the head is counted: it is in memory, and trained, in
    fine-tuning.
    """
    has_head = not facts.tie_word_embeddings and not facts.architecture.endswith("Model")
    classifies = facts.architecture.endswith("ForSequenceClassification")
    positions, embedding_norms = (
        _positions(facts),
        norms(facts, 2 if facts.embedding_layernorm else 0).inside("embedding"),
    )
    final_norms = norms(facts, 2 if _has_final_norms(facts) else 0).inside("final")
    table = tensor(facts.vocab_size, facts.hidden_size, name="tokens.weight")
    head = tensor(facts.vocab_size, facts.hidden_size, name="head.weight")
    return count_weights(
        embedding=table + positions + embedding_norms + _audio_stem(facts),
        blocks=_encoder_decoder_blocks(facts),
        head=_classifier(facts) if classifies else head if has_head else NOTHING,
        other=final_norms + _both_relative_positions(facts),
    )


def _classifier(facts: ModelFacts) -> Weights:
    hidden = facts.hidden_size
    return linear(hidden, hidden, "classifier_dense", bias=True) + linear(
        hidden, facts.num_labels, "classifier", bias=True
    )


def _both_relative_positions(facts: ModelFacts) -> Weights:
    """T5's two tables of relative positions, one per stack."""
    if not facts.relative_attention_num_buckets:
        return NOTHING
    table = tensor(facts.relative_attention_num_buckets, facts.num_heads, name="relative_positions.weight")
    return table.inside("encoder") + table.inside("decoder")


def _has_final_norms(facts: ModelFacts) -> bool:
    return facts.final_norm and not facts.post_norm


def _positions(facts: ModelFacts) -> Weights:
    """Position tables of both stacks.

    Whisper has two lengths. Pegasus keeps its fixed sinusoids as (frozen) parameters; M2M-100 as buffers, not counted.
    """
    hidden = facts.hidden_size
    if facts.max_source_positions:
        source = tensor(facts.max_source_positions, hidden, name="encoder.positions.weight")
        return source + tensor(facts.max_target_positions, hidden, name="decoder.positions.weight")
    if facts.learned_positions or facts.model_type == "pegasus":
        table = tensor(facts.max_position_embeddings + facts.position_offset, hidden, name="positions.weight")
        return table.inside("encoder") + table.inside("decoder")
    return NOTHING


def _audio_stem(facts: ModelFacts) -> Weights:
    """Whisper's two convolutions of width 3 over the mel spectrogram."""
    if not facts.num_mel_bins:
        return NOTHING
    hidden = facts.hidden_size
    first = tensor(hidden, facts.num_mel_bins, 3, name="conv1.weight") + vector(hidden, "conv1.bias")
    return first + tensor(hidden, hidden, 3, name="conv2.weight") + vector(hidden, "conv2.bias")


def _encoder_decoder_blocks(facts: ModelFacts) -> tuple[BlockCount, ...]:
    attend = attention(facts)
    encoder = attend + mlp(facts, facts.intermediate_size) + norms(facts, 2)
    decoder_width = facts.decoder_intermediate_size or facts.intermediate_size
    decoder = attend + attend.inside("cross") + mlp(facts, decoder_width) + norms(facts, 3)
    return (
        block_count("encoder", facts.encoder_layers or facts.num_layers, encoder),
        block_count("decoder", facts.decoder_layers, decoder),
    )


def count_vision(facts: ModelFacts) -> ParameterCounts:
    """ViT and DINOv2: class token, patches, blocks, final norm, and a pooler or classifier where there is one."""
    hidden = facts.hidden_size
    tokens = tensor(1, 1, hidden, name="class_token")
    if facts.layer_scale:
        tokens += tensor(1, hidden, name="mask_token")  # DINOv2's mask token
    positions = tensor(1, _patches(facts.image_size, facts.patch_size) + 1, hidden, name="positions")
    pooler = linear(hidden, hidden, "pooler", bias=True) if facts.pooler else NOTHING
    inputs = _classifier_inputs(facts)
    classifier = linear(inputs, facts.num_labels, "classifier", bias=True) if _classifies(facts) else NOTHING
    return count_weights(
        embedding=_patch_projection(facts, hidden, facts.patch_size)
        + vector(hidden, "patches.bias")
        + tokens
        + positions,
        blocks=(_vision_block(facts, "vision", facts.num_layers),),
        head=classifier,
        other=norm(facts, name="final_norm") + pooler,
    )


def count_vision_text(facts: ModelFacts) -> ParameterCounts:
    """CLIP: two towers, two projections without bias, and the logit scale.

    Raises:
        ValueError: the facts lack a tower.
    """
    if facts.text is None or facts.vision is None:
        raise ValueError(f"{facts.name}: a vision-text model needs both towers")
    text, vision = _as_tower(facts, facts.text), _as_tower(facts, facts.vision)
    patches = _patches(facts.vision.image_size, facts.vision.patch_size)
    vision_embedding = (
        _patch_projection(facts, vision.hidden_size, facts.vision.patch_size)
        + vector(vision.hidden_size, "class_token")
        + tensor(patches + 1, vision.hidden_size, name="image_positions.weight")
    )
    text_embedding = tensor(text.vocab_size, text.hidden_size, name="tokens.weight")
    text_embedding += tensor(text.max_position_embeddings, text.hidden_size, name="positions.weight")
    projections = tensor(facts.projection_dim, vision.hidden_size, name="image_projection.weight")
    projections += tensor(facts.projection_dim, text.hidden_size, name="text_projection.weight")
    logit_scale = tensor(name="logit_scale")
    return count_weights(
        embedding=vision_embedding + text_embedding,
        blocks=(_vision_block(text, "text", text.num_layers), _vision_block(vision, "vision", vision.num_layers)),
        head=projections,
        other=norms(vision, 2).inside("image") + norm(text, name="final_norm") + logit_scale,
    )


def count_vision_language(facts: ModelFacts) -> ParameterCounts:
    """Gemma 3: a language model, a SigLIP tower without class token or head, and the projection between them.

    Raises:
        ValueError: the facts lack the vision tower.
    """
    if facts.vision is None:
        raise ValueError(f"{facts.name}: a vision-language model needs a vision tower")
    language = count_decoder(facts)
    siglip = replace(
        _as_tower(facts, facts.vision),
        gated_mlp=False,
        norm="layernorm",
        norm_bias=True,
        qkv_bias=True,
        attn_out_bias=True,
        mlp_bias=True,
        qk_norm=False,
    )
    pooled = facts.vision.pooling_head
    width, patches = siglip.hidden_size, _patches(facts.vision.image_size, facts.vision.patch_size)
    tower = _patch_projection(facts, width, facts.vision.patch_size) + vector(width, "patches.bias")
    tower += tensor(patches, width, name="image_positions.weight")
    other = norm(siglip, name="image_norm") + tensor(width, facts.hidden_size, name="image_projection.weight")
    other += vector(width, "image_projection_norm.weight")
    if pooled:
        other += _pooling_head(siglip)
    return ParameterCounts(
        embedding=language.embedding + tower.total,
        blocks=(*language.blocks, _vision_block(siglip, "vision", siglip.num_layers)),
        head=language.head,
        other=language.other + other.total,
        outside=language.outside + tower.shapes + other.shapes,
        names=language.names + tower.names + other.names,
    )


def _pooling_head(tower: ModelFacts) -> Weights:
    """SigLIP's head: one learned query, a multi-head attention with fused inputs, a norm and an MLP."""
    query = tensor(1, 1, tower.hidden_size, name="probe")
    head = query + attention(tower) + norm(tower) + mlp(tower, tower.intermediate_size)
    return head.inside("image_head")


def _as_tower(facts: ModelFacts, tower: TowerFacts) -> ModelFacts:
    """One tower as facts of its own, with everything else as in the whole model."""
    return replace(
        facts,
        hidden_size=tower.hidden_size,
        num_layers=tower.num_layers,
        num_heads=tower.num_heads,
        num_kv_heads=tower.num_heads,
        head_dim=tower.hidden_size // tower.num_heads,
        intermediate_size=tower.intermediate_size,
        vocab_size=tower.vocab_size,
        max_position_embeddings=tower.max_position_embeddings,
    )


def _vision_block(facts: ModelFacts, name: str, repeats: int) -> BlockCount:
    block = attention(facts) + mlp(facts, facts.intermediate_size) + norms(facts, 2)
    if facts.layer_scale:
        block += vector(facts.hidden_size, "scale1") + vector(facts.hidden_size, "scale2")
    return block_count(name, repeats, block)


def _patches(image_size: int, patch_size: int) -> int:
    return (image_size // patch_size) ** 2


def _patch_projection(facts: ModelFacts, width: int, patch_size: int) -> Weights:
    return tensor(width, facts.num_channels or 3, patch_size, patch_size, name="patches.weight")


def _classifies(facts: ModelFacts) -> bool:
    return facts.architecture.endswith("ForImageClassification") and facts.num_labels > 0


def _classifier_inputs(facts: ModelFacts) -> int:
    """DINOv2 classifies the class token next to the mean of the patches."""
    return facts.hidden_size * (2 if facts.layer_scale else 1)

"""The transformers of the zoo, each made small from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TOKENS = 99
SMALL = {"vocab_size": TOKENS, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
FFN = SMALL | {"intermediate_size": 96}
GROUPED = FFN | {"num_key_value_heads": 2, "pad_token_id": 0}
BARE = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4}
SEQ2SEQ = BARE | {"vocab_size": TOKENS, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
CLIP_TOWER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGES = {"image_size": 32, "patch_size": 8}


@dataclass(frozen=True)
class Spec:
    """A model of transformers: class, configuration and what is asked of it."""

    cls: str
    config: str
    settings: dict[str, Any]
    takes: tuple[str, ...] = ("input_ids",)
    gives: str = "logits"


PAIR = ("input_ids", "decoder_input_ids")
TRANSFORMERS: dict[str, Spec] = {
    "albert": Spec("AlbertForMaskedLM", "AlbertConfig", FFN | {"embedding_size": 32}),
    "bart": Spec("BartForConditionalGeneration", "BartConfig", SEQ2SEQ, PAIR),
    "beit": Spec("BeitForImageClassification", "BeitConfig", FFN | IMAGES, ("pixel_values",)),
    "bert": Spec("BertForMaskedLM", "BertConfig", FFN),
    "bert_relu": Spec("BertForSequenceClassification", "BertConfig", FFN | {"hidden_act": "relu"}),
    "bloom": Spec(
        "BloomForCausalLM", "BloomConfig", {"vocab_size": TOKENS, "hidden_size": 64, "n_layer": 2, "n_head": 4}
    ),
    "clip": Spec(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": CLIP_TOWER | {"vocab_size": TOKENS, "eos_token_id": 1, "pad_token_id": 0},
            "vision_config": CLIP_TOWER | IMAGES,
            "projection_dim": 32,
        },
        ("input_ids", "pixel_values"),
        "logits_per_image",
    ),
    "convbert": Spec("ConvBertForMaskedLM", "ConvBertConfig", FFN | {"embedding_size": 64}),
    "deberta_v2": Spec("DebertaV2ForMaskedLM", "DebertaV2Config", FFN),
    "dinov2": Spec("Dinov2ForImageClassification", "Dinov2Config", FFN | IMAGES, ("pixel_values",)),
    "distilbert": Spec(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": TOKENS, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 96},
    ),
    "electra": Spec("ElectraForSequenceClassification", "ElectraConfig", FFN | {"embedding_size": 32}),
    "falcon": Spec("FalconForCausalLM", "FalconConfig", SMALL | {"pad_token_id": 0}),
    "gemma": Spec("GemmaForCausalLM", "GemmaConfig", GROUPED | {"head_dim": 16}),
    "gemma2": Spec("Gemma2ForCausalLM", "Gemma2Config", GROUPED | {"head_dim": 16}),
    "gpt2": Spec("GPT2LMHeadModel", "GPT2Config", {"vocab_size": TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "gpt_neox": Spec("GPTNeoXForCausalLM", "GPTNeoXConfig", FFN),
    "gptj": Spec(
        "GPTJForCausalLM",
        "GPTJConfig",
        {"vocab_size": TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    ),
    "granite": Spec("GraniteForCausalLM", "GraniteConfig", GROUPED),
    "llama": Spec("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "llama_relu": Spec("LlamaForCausalLM", "LlamaConfig", GROUPED | {"hidden_act": "relu"}),
    "mamba": Spec("MambaForCausalLM", "MambaConfig", {"vocab_size": TOKENS, "hidden_size": 64, "num_hidden_layers": 2}),
    "mistral": Spec("MistralForCausalLM", "MistralConfig", GROUPED),
    "mixtral": Spec("MixtralForCausalLM", "MixtralConfig", GROUPED | {"num_local_experts": 4}),
    "olmo2": Spec("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "opt": Spec(
        "OPTForCausalLM",
        "OPTConfig",
        SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    ),
    "phi": Spec("PhiForCausalLM", "PhiConfig", FFN | {"pad_token_id": 0}),
    "phi3": Spec("Phi3ForCausalLM", "Phi3Config", GROUPED),
    "qwen2": Spec("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": Spec("Qwen3ForCausalLM", "Qwen3Config", GROUPED | {"head_dim": 16}),
    "roberta": Spec("RobertaForMaskedLM", "RobertaConfig", FFN | {"max_position_embeddings": 64}),
    "segformer": Spec(
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "decoder_hidden_size": 32},
        ("pixel_values",),
    ),
    "swin": Spec(
        "SwinForImageClassification",
        "SwinConfig",
        {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
        ("pixel_values",),
    ),
    "t5": Spec(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": TOKENS, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
        PAIR,
    ),
    "t5_gated": Spec(
        "T5EncoderModel",
        "T5Config",
        {"vocab_size": TOKENS, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
        | {"feed_forward_proj": "gated-gelu"},
        gives="last_hidden_state",
    ),
    "vit": Spec("ViTForImageClassification", "ViTConfig", FFN | IMAGES, ("pixel_values",)),
    "wav2vec2": Spec(
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        FFN
        | {"conv_dim": (32, 32), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
        | {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4},
        ("input_values",),
    ),
    "whisper": Spec(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        SEQ2SEQ
        | {"num_mel_bins": 16, "max_source_positions": 30, "max_target_positions": 20}
        | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        ("input_features", "decoder_input_ids"),
    ),
}


class Only(nn.Module):
    """A transformer that takes tensors by position and returns one tensor, without a cache of keys and values."""

    def __init__(self, model: nn.Module, takes: tuple[str, ...], gives: str) -> None:
        super().__init__()
        self.model = model
        self.takes, self.gives = takes, gives
        for config in (getattr(module, "config", None) for module in model.modules()):
            if getattr(config, "use_cache", None):
                config.use_cache = False

    def forward(self, *inputs: Tensor) -> Tensor:
        return getattr(self.model(**dict(zip(self.takes, inputs, strict=True))), self.gives)


def draw_for(spec: Spec) -> Callable[[torch.Generator], tuple[Tensor, ...]]:
    """Draws random inputs of the kinds that a model takes: tokens, images, spectra or sound."""
    shapes = {"pixel_values": (2, 3, 32, 32), "input_features": (2, 16, 60), "input_values": (2, 400)}

    def draw(random: torch.Generator) -> tuple[Tensor, ...]:
        return tuple(
            torch.randn(shapes[name], generator=random)
            if name in shapes
            else torch.randint(3, TOKENS, (2, 12), generator=random)
            for name in spec.takes
        )

    return draw

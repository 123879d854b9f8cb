"""Tiny random models of several architectures, built from configs."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 320
COMMON = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 2}
EXPERTS = {
    **GROUPED, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 40, "shared_expert_intermediate_size": 40, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
GPT = {"vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "rotary_dim": 4}


def config_of(name: str, **changes: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**{**CONFIGS[name], **changes})


def build(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A model with random weights large enough that every part of it shows in the logits."""
    torch.manual_seed(seed)
    config = deepcopy(config)  # a model writes its attention implementation into its config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    return model.to(dtype).eval()


def prompt(length: int, seed: int, vocab: int = VOCAB) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(3, vocab, (length,), generator=generator).tolist()
    return tokens


def save(directory: Path, config: Any, *, dtype: torch.dtype = torch.float32, seed: int = 0, shift: int = 0) -> str:
    """A tiny model and a tokenizer with one token per byte, starting at id 10 + shift."""
    build(config, dtype, seed).save_pretrained(directory)
    return save_tokenizer(directory, shift)


def save_tokenizer(directory: Path, shift: int = 0) -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {f"<{i}>": i for i in range(10 + shift)} | {c: 10 + shift + i for i, c in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<2>").save_pretrained(directory)
    return str(directory)


def write_gguf(file: Path, changes: Mapping[str, tuple[int, ...] | None] = MappingProxyType({})) -> Path:
    """A Llama of one layer; `changes` are tensors of other shapes, further ones, and ones that are left out (None)."""
    width, vocab = 32, 259
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab)
    writer.add_tokenizer_model("llama")
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * vocab)
    writer.add_token_types([2, 3, 3, *[6] * 256])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    shapes = {
        "token_embd": (vocab, width), "output_norm": (width,), "output": (vocab, width),
        "blk.0.attn_norm": (width,), "blk.0.ffn_norm": (width,),
        **{f"blk.0.attn_{part}": (width, width) for part in ("q", "k", "v", "output")},
        "blk.0.ffn_gate": (64, width), "blk.0.ffn_up": (64, width), "blk.0.ffn_down": (width, 64),
    }  # fmt: skip
    numbers = np.random.default_rng(0)
    for name, shape in {**shapes, **changes}.items():
        if shape is None:
            continue
        writer.add_tensor(f"{name}.weight", numbers.normal(size=shape).astype(np.float32) * 0.1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


CONFIGS: dict[str, dict[str, Any]] = {
    "Llama": GROUPED,
    "Mistral": {**GROUPED, "sliding_window": None},
    "Qwen2": GROUPED,
    "Qwen3": {**GROUPED, "head_dim": 16},
    "Gemma": {**GROUPED, "head_dim": 16},
    "GPTNeoX": COMMON,
    "Phi": COMMON,
    "Phi3": {**GROUPED, "sliding_window": None},
    "GPT2": {
        "vocab_size": VOCAB, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256, "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "OPT": {**COMMON, "ffn_dim": 80, "word_embed_proj_dim": 48},
    "Mixtral": {**EXPERTS, "sliding_window": None},
    "Qwen2Moe": EXPERTS,
    "GraniteMoe": EXPERTS,
    "Glm4Moe": {**EXPERTS, "head_dim": 8},
    "JetMoe": {**EXPERTS, "kv_channels": 8},
    "HunYuanMoEV1": {**EXPERTS, "head_dim": 8, "moe_topk": 2},
    "Olmo2": GROUPED,
    "Starcoder2": GROUPED,
    "Cohere2": {**GROUPED, "head_dim": 8},
    "Olmo3": GROUPED,
    "Exaone4": GROUPED,
    "Gemma2": {**GROUPED, "head_dim": 8},
    "VaultGemma": {**GROUPED, "head_dim": 8},
    "Gemma3nText": {
        **GROUPED, "head_dim": 8, "sliding_window": 16, "num_hidden_layers": 4, "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8, "laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "Gemma4Text": {
        **GROUPED, "head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1, "sliding_window": 16,
        "num_hidden_layers": 6, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8, "layer_types": ["sliding_attention", "full_attention"] * 3,
    },
    "GraniteSWA": {**GROUPED, "head_dim": 8},
    "Ministral": {**GROUPED, "head_dim": 8},
    "ModernBertDecoder": {**COMMON, "local_attention": 32, "cls_token_id": 1, "sep_token_id": 2},
    "Afmoe": {**GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "Cwm": {
        **GROUPED, "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
    },
    "SmolLM3": GROUPED,
    "Phimoe": {**GROUPED, "num_local_experts": 4},
    "Gemma3Text": {**GROUPED, "head_dim": 8, "sliding_window": 16},
    "GptOss": {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "DeepseekV3": {
        **COMMON, "num_key_value_heads": 6, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    },
    "GPTBigCode": GPT,
    "GPTJ": GPT,
    "CodeGen": GPT,
    "CTRL": {**GPT, "dff": 80},
    "OpenAIGPT": GPT,
    "XGLM": {
        "vocab_size": VOCAB, "d_model": 48, "ffn_dim": 80, "num_layers": 3, "attention_heads": 6,
        "max_position_embeddings": 256,
    },
    "BioGpt": COMMON,
    "Bert": {**COMMON, "is_decoder": True},
    "Persimmon": COMMON,
    "Ministral3": {**GROUPED, "head_dim": 8},
    "Olmo": GROUPED,
    "FlexOlmo": EXPERTS,
    "Granite": GROUPED,
    "GraniteMoeShared": EXPERTS,
    "GraniteMoeHybrid": {
        **EXPERTS, "mamba_n_heads": 6, "mamba_d_head": 16, "layer_types": ["mamba", "attention", "mamba"],
    },
    "Ernie4_5": GROUPED,
    "Ernie4_5_Moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "ExaoneMoe": EXPERTS,
    "SeedOss": {**GROUPED, "head_dim": 8},
    "Helium": {**GROUPED, "head_dim": 8},
    "Cohere": GROUPED,
    "Cohere2Moe": EXPERTS,
    "Glm": {**GROUPED, "head_dim": 8},
    "Glm4": {**GROUPED, "head_dim": 8},
    "Dots1": {**EXPERTS, "head_dim": 8, "n_shared_experts": 1},
    "Qwen3Moe": {**EXPERTS, "head_dim": 16},
    "MiniMax": {**EXPERTS, "head_dim": 8},
    "MiniMaxM2": {**EXPERTS, "head_dim": 8},
    "HunYuanDenseV1": {**GROUPED, "head_dim": 8},
    "HyperCLOVAX": GROUPED,
    "Apertus": GROUPED,
    "Arcee": GROUPED,
    "NanoChat": GROUPED,
    "Jais2": GROUPED,
    "BitNet": GROUPED,
    "SolarOpen": EXPERTS,
    "Laguna": EXPERTS,
    "DiffLlama": GROUPED,
    "Doge": GROUPED,
    "Llama4Text": {**EXPERTS, "head_dim": 8, "attention_chunk_size": 64},
    "Qwen3Next": {**EXPERTS, "head_dim": 8},
    "RecurrentGemma": GROUPED,
    "Jamba": EXPERTS,
    "Mamba": {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2},
    "Bart": {"vocab_size": VOCAB, "d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 6},
    "Bloom": {"vocab_size": VOCAB, "hidden_size": 48, "n_layer": 3, "n_head": 6},
    "Mpt": {"vocab_size": VOCAB, "d_model": 48, "n_layers": 3, "n_heads": 6, "max_seq_len": 256},
    "Falcon": {**COMMON, "new_decoder_architecture": True, "num_kv_heads": 2},
    "StableLm": GROUPED,
    "Nemotron": GROUPED,
    "Olmoe": {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "GPTNeo": {**COMMON, "num_layers": 3, "num_heads": 6, "attention_types": [[["global"], 3]]},
    "Lfm2": {**GROUPED, "full_attn_idxs": [1]},
    "Mamba2": {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_heads": 6, "head_dim": 16},
}  # fmt: skip
LONGROPE = {
    "original_max_position_embeddings": 64,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0,
        "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    },
}  # fmt: skip
ACCEPTED = ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "GPTNeoX", "Phi", "Phi3", "GPT2", "OPT", "Mixtral", "Olmo2"]
WEIGHED: list[tuple[str, dict[str, Any]]] = [
    ("Mistral", {"sliding_window": 17}),
    ("Mixtral", {"sliding_window": 17}),
    ("Qwen2", {"sliding_window": 17, "use_sliding_window": True, "max_window_layers": 1}),
    ("Qwen3", {"sliding_window": 17, "use_sliding_window": True, "max_window_layers": 1}),
    ("Phi3", {"sliding_window": 17}),
    ("Starcoder2", {"sliding_window": 17}),
    ("Ministral", {"sliding_window": 17}),
    ("Cohere2", {"sliding_window": 17}),
    ("Olmo3", {"sliding_window": 17}),
    ("Exaone4", {"sliding_window": 17}),
    ("Gemma2", {"sliding_window": 17, "attn_logit_softcapping": 3.0}),
    ("VaultGemma", {"sliding_window": 17, "attn_logit_softcapping": 3.0}),
    ("Gemma3Text", {}),
    ("Gemma3nText", {}),
    ("Gemma4Text", {}),
    ("GptOss", {}),
    ("GraniteSWA", {"sliding_window": 17}),
    ("ModernBertDecoder", {}),
    ("Afmoe", {"sliding_window": 17}),
    ("Cwm", {"sliding_window": 17}),
    ("Bloom", {}),
    ("Mpt", {}),
    ("Falcon", {}),
    ("Falcon", {"new_decoder_architecture": False, "multi_query": True, "alibi": True}),
    (
        "Falcon",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "num_kv_heads": 6,
            "alibi": True,
            "parallel_attn": False,
        },
    ),
    ("StableLm", {}),
    ("Nemotron", {}),
    ("SmolLM3", {"sliding_window": 17, "use_sliding_window": True}),
]
"""Architectures that weigh their keys otherwise, or whose layers differ."""

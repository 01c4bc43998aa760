"""A small model of each family for a GPU: one head size and one width wherever the family allows, since kernels are
compiled for these."""

from __future__ import annotations

from typing import Any

BOTH = ("float32", "bfloat16")
BASE = dict(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
OLD = dict(vocab_size=1024, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=512)
HEAD = dict(head_dim=64)
WINDOW = dict(sliding_window=48)
LONG = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0 + 0.02 * i for i in range(24)],
    long_factor=[1.5 + 0.1 * i for i in range(24)],
    partial_rotary_factor=0.75,
)
EXPERTS = dict(num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128)
ROUTED = dict(n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, n_shared_experts=1)
LATENT = dict(
    num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64
)
YARN = dict(rope_type="yarn", rope_theta=150000.0, factor=4.0, truncate=False, original_max_position_embeddings=128)
SOFTCAPS = dict(query_pre_attn_scalar=64, attn_logit_softcapping=20.0, final_logit_softcapping=10.0)
SLIDES = dict(layer_types=["sliding_attention", "full_attention", "sliding_attention"], num_hidden_layers=3)

SHAPES: dict[str, list[dict[str, Any]]] = {
    "LlamaForCausalLM": [BASE, BASE | dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)],
    "MistralForCausalLM": [BASE | WINDOW],
    "Qwen2ForCausalLM": [BASE],
    "Qwen3ForCausalLM": [BASE | HEAD],
    "GemmaForCausalLM": [BASE | HEAD | dict(num_key_value_heads=1)],
    "Gemma2ForCausalLM": [BASE | HEAD | WINDOW | SOFTCAPS],
    "Gemma3ForCausalLM": [
        BASE | HEAD | WINDOW | SLIDES | dict(query_pre_attn_scalar=64),
        BASE | WINDOW | SLIDES | dict(head_dim=256, num_key_value_heads=1, only=("bfloat16",)),
    ],
    "Phi3ForCausalLM": [BASE | dict(pad_token_id=0, rope_parameters=LONG, original_max_position_embeddings=128)],
    "Olmo2ForCausalLM": [BASE],
    "GraniteForCausalLM": [
        BASE | dict(embedding_multiplier=6.0, attention_multiplier=0.1, residual_multiplier=0.4, logits_scaling=0.5)
    ],
    "Starcoder2ForCausalLM": [BASE | WINDOW],
    "GPT2LMHeadModel": [dict(vocab_size=1024, n_embd=256, n_layer=2, n_head=4, n_positions=512)],
    "GPTNeoXForCausalLM": [OLD | dict(intermediate_size=512)],
    "OPTForCausalLM": [
        OLD | dict(ffn_dim=512),
        OLD | dict(ffn_dim=512, do_layer_norm_before=False, word_embed_proj_dim=128),
    ],
    "BloomForCausalLM": [dict(vocab_size=1024, hidden_size=256, n_layer=2, n_head=4, seq_length=512)],
    "FalconForCausalLM": [
        OLD,
        OLD | dict(new_decoder_architecture=True, num_kv_heads=2, tie_word_embeddings=False),
        OLD | dict(alibi=True, bias=True, multi_query=False, parallel_attn=False),
    ],
    "MixtralForCausalLM": [BASE | dict(num_local_experts=8, num_experts_per_tok=2)],
    "Qwen2MoeForCausalLM": [
        BASE | EXPERTS | dict(shared_expert_intermediate_size=256, decoder_sparse_step=1, norm_topk_prob=False)
    ],
    "Qwen3MoeForCausalLM": [BASE | HEAD | EXPERTS | dict(norm_topk_prob=True)],
    "OlmoeForCausalLM": [BASE | dict(num_experts=16, num_experts_per_tok=4)],
    "GraniteMoeForCausalLM": [BASE | dict(num_local_experts=8, num_experts_per_tok=2)],
    "PhimoeForCausalLM": [BASE | dict(num_local_experts=8, num_experts_per_tok=2)],
    "Glm4MoeForCausalLM": [
        BASE | HEAD | dict(n_routed_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, use_qk_norm=True)
    ],
    "GptOssForCausalLM": [
        BASE | HEAD | WINDOW | dict(num_local_experts=8, num_experts_per_tok=2, rope_parameters=YARN)
    ],
    "DeepseekV2ForCausalLM": [
        BASE
        | LATENT
        | ROUTED
        | dict(first_k_dense_replace=1, qk_nope_head_dim=128, qk_rope_head_dim=64, kv_lora_rank=512),
        BASE | LATENT | ROUTED | dict(topk_method="group_limited_greedy", n_group=4, topk_group=2, q_lora_rank=128),
    ],
    "DeepseekV3ForCausalLM": [
        BASE | LATENT | ROUTED | dict(q_lora_rank=128, n_group=4, topk_group=2, first_k_dense_replace=1)
    ],
    "Glm4MoeLiteForCausalLM": [BASE | LATENT | ROUTED | dict(q_lora_rank=128)],
    "MiniCPM3ForCausalLM": [BASE | LATENT | dict(q_lora_rank=128, scale_emb=3, scale_depth=1.1, dim_model_base=128)],
    "YoutuForCausalLM": [BASE | LATENT | dict(q_lora_rank=128)],
    "ArceeForCausalLM": [BASE],
    "SeedOssForCausalLM": [BASE | HEAD],
    "CohereForCausalLM": [BASE | dict(logit_scale=0.5)],
    "Cohere2ForCausalLM": [BASE | WINDOW | SLIDES | dict(logit_scale=0.5)],
    "Ernie4_5ForCausalLM": [BASE | HEAD],
    "Ernie4_5_MoeForCausalLM": [BASE | dict(moe_num_experts=16, moe_k=4, moe_intermediate_size=128)],
    "Exaone4ForCausalLM": [BASE | WINDOW | SLIDES],
    "GlmForCausalLM": [BASE | HEAD | dict(pad_token_id=0)],
    "Glm4ForCausalLM": [BASE | HEAD | dict(pad_token_id=0)],
    "Olmo3ForCausalLM": [BASE | WINDOW | SLIDES],
    "PhiForCausalLM": [BASE | dict(partial_rotary_factor=0.5)],
    "SmolLM3ForCausalLM": [BASE | dict(pad_token_id=0, no_rope_layers=[0, 1])],
    "StableLmForCausalLM": [BASE | dict(partial_rotary_factor=0.25)],
    "BertModel": [
        dict(
            vocab_size=1024,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
        )
    ],
}
# The shape of SmolLM2-135M.
SMOLLM2 = dict(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    rms_norm_eps=1e-5,
    rope_parameters=dict(rope_type="default", rope_theta=100000.0),
)


def dtypes(shape: dict[str, Any]) -> tuple[str, ...]:
    return tuple(shape.get("only", BOTH))

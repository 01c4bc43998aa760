"""StarCoder2: layer norms, biases everywhere, a plain MLP and a sliding window."""

from __future__ import annotations

from penstock.models.config import Config, rope
from penstock.models.families.llama import TINY
from penstock.models.families.parts import activation, attention, head_size, layer_norm, mlp, model, num_layers, window
from penstock.models.names import LLAMA, PLAIN_MLP
from penstock.models.spec import Block, ModelSpec, family


@family("Starcoder2ForCausalLM", like=[TINY | dict(sliding_window=13), TINY | dict(use_bias=False)])
def starcoder2(c: Config) -> ModelSpec:
    c.ignore("activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    c.only("mlp_type", "default")
    c.only("norm_type", "layer_norm")
    c.only("scale_attn_weights", True)
    bias, norm = c.flag("use_bias", True), layer_norm(c, "norm_epsilon", "layer_norm_epsilon")
    block = Block(
        attention(c, rope=rope(c, head_size(c)), window=window(c), qkv_bias=bias, out_bias=bias),
        mlp(c, activation(c, default="gelu_pytorch_tanh"), bias),
        mixer_norm=norm,
        ffn_norm=norm,
    )
    return model(c, layers=[block] * num_layers(c), norm=norm, names=LLAMA | PLAIN_MLP, tied=True)

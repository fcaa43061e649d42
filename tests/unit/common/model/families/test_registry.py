"""A family is a short description: new ones run like transformers' own model, and what is not implemented is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import oracle
from support.oracle import TINY, Tiny, make_tiny
from support.runner_cases import check, drive, make_runner, prompt
from torch.nn import functional as F
from transformers import GraniteConfig

from common.base.errors import ConfigError
from common.model.config import load_model_config
from common.model.config_file import ConfigFile
from common.model.description import ACTIVATIONS, LayerDescription, NormDescription, WeightNames
from common.model.families.base import Family, read_attention, read_mlp, repeat_layer
from common.model.families.registry import FAMILIES
from common.model.loader import load_model

# A family of its own: Granite's scale of attention, GELU, and other names of weights.


def _describe_toy(config: ConfigFile) -> tuple[LayerDescription, ...]:
    attention = replace(read_attention(config), scale=config.number("attention_multiplier"))
    return repeat_layer(config, attention, read_mlp(config))


TOY_NAMES = WeightNames(layer="decoder.{number}", embedding="words", gate="mlp.gate", mlp_norm="norm_before_mlp")
TOY = Family(("ToyForCausalLM",), _describe_toy, default_max_position=64, weight_names=TOY_NAMES)
TOY_ACTIVATION = {"gelu": lambda kernels: lambda gate_up: F.gelu(gate_up.chunk(2, -1)[0]) * gate_up.chunk(2, -1)[1]}

_RENAMED = {
    "model.layers": "decoder",
    "model.embed_tokens": "words",
    "gate_proj": "gate",
    "post_attention_layernorm": "norm_before_mlp",
}


def make_toy(root: Path) -> tuple[Path, Path]:
    """Granite as transformers has it, and the same weights as a checkpoint of the toy family."""
    shape = {"num_hidden_layers": 2, "vocab_size": 250, "hidden_size": 64, "intermediate_size": 112}
    config = GraniteConfig(
        **shape, num_attention_heads=4, num_key_value_heads=2, hidden_act="gelu", attention_multiplier=0.4
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(oracle.TINY, "granite", Tiny(config))
        theirs = make_tiny("granite", root / "theirs")
    toy = root / "toy"
    toy.mkdir()
    raw = json.loads((theirs / "config.json").read_text())
    (toy / "config.json").write_text(json.dumps({**raw, "architectures": ["ToyForCausalLM"]}))
    tensors = load_file(theirs / "model.safetensors")
    for old, new in _RENAMED.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    save_file(tensors, toy / "model.safetensors")
    return theirs, toy


def test_a_new_family_is_one_description_and_generates_what_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, toy = make_toy(tmp_path)
    with pytest.raises(ConfigError, match=r"ToyForCausalLM.*supported: LlamaForCausalLM"):
        load_model_config(toy)
    monkeypatch.setitem(FAMILIES, "ToyForCausalLM", TOY)
    with pytest.raises(ConfigError, match="hidden_act 'gelu' is not supported; supported: silu"):
        load_model_config(toy)
    for name, activation in TOY_ACTIVATION.items():
        monkeypatch.setitem(ACTIVATIONS, name, activation)
    prompts = [prompt(n, 250) for n in (1, 17, 40)]
    check(theirs, prompts, drive(make_runner(toy), prompts, 16, 12), 12)


@pytest.mark.parametrize(
    ("attention", "mlp", "norm", "says"),
    [
        ({"v_head_dim": 8}, {}, {}, r"heads of v of another width \(8\)"),
        ({"window": 64}, {}, {}, r"a sliding window \(64 tokens\)"),
        ({"soft_cap": 50.0}, {}, {}, "a soft cap"),
        ({"has_sinks": True}, {}, {}, "attention sinks"),
        ({"head_norm": NormDescription(1e-6, "layer")}, {}, {}, "'layer' norm of heads"),
        ({}, {"activation": "relu"}, {}, "activation 'relu', which is not implemented; implemented: silu"),
        ({}, {"kind": "experts"}, {}, "MLP 'experts', which is not implemented; implemented: gated"),
        ({}, {}, {"kind": "layer"}, "norm 'layer', which is not implemented; implemented: rms"),
    ],
)
def test_a_description_without_implementation_is_refused_at_load(
    tmp_path: Path, attention: dict[str, Any], mlp: dict[str, Any], norm: dict[str, Any], says: str
) -> None:
    path = make_tiny("llama", tmp_path / "llama")
    config = load_model_config(path)
    layer = config.layers[0]
    asked = replace(
        layer,
        attention=replace(layer.attention, **attention),
        mlp=replace(layer.mlp, **mlp),
        norm=replace(layer.norm, **norm),
    )
    config = replace(config, layers=(asked,) * config.num_layers)
    with pytest.raises(ConfigError, match=says):
        load_model(path, config, dtype="float32", load_format="dummy", seed=0, small_batches=True)


def test_layers_that_differ_in_attention_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def alternating(config: ConfigFile) -> tuple[LayerDescription, ...]:
        first, *others = FAMILIES["MistralForCausalLM"].describe(config)
        return (replace(first, attention=replace(first.attention, window=32)), *others)

    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", replace(FAMILIES["LlamaForCausalLM"], describe=alternating))
    path = make_tiny("llama", tmp_path / "llama")
    with pytest.raises(ConfigError, match="LlamaForCausalLM differ in their attention"):
        load_model_config(path)


def test_every_family_has_a_tiny_model_that_is_held_against_transformers() -> None:
    tested = {type(tiny.config).__name__.replace("Config", "ForCausalLM") for tiny in TINY.values()}
    assert tested == set(FAMILIES)


def test_layers_are_described_as_the_architecture_computes_them(tmp_path: Path) -> None:
    expected = {"llama": (False, False), "llama-biases": (True, True), "qwen2": (True, False), "qwen3": (False, False)}
    for name, biases in expected.items():
        config = load_model_config(make_tiny(name, tmp_path / name))
        attention = config.attention
        assert (attention.qkv_bias, attention.output_bias) == biases
        assert (attention.head_norm is not None) == (name == "qwen3")
        assert attention.scale == pytest.approx(attention.head_dim**-0.5)
        assert (attention.window, attention.soft_cap, attention.has_sinks) == (None, None, False)
        assert {layer.norm for layer in config.layers} == {config.final_norm}
        assert torch.tensor([layer.mlp.inner_size for layer in config.layers]).unique().numel() == 1

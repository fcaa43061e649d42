"""Random weights of a shape as a Hugging Face checkpoint: every system of the comparison loads the same ones."""

from __future__ import annotations

from pathlib import Path

from bench.shape import Shape, make_model_folder

_SEED = 20_250_101
_STD = 0.02
"""Standard deviation of the weights, that of the initialization which both families use."""


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor by its name in the checkpoint. A Qwen2 shape has biases and no LM head of its own;
    one with experts has a router and norms of queries and keys."""
    hidden, inner = shape.hidden, shape.intermediate
    sizes = {"q": shape.q_heads * shape.head_dim, "k": shape.kv_heads * shape.head_dim}
    sizes["v"] = sizes["k"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, hidden)}
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        for name, size in sizes.items():
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (size, hidden)
            if not shape.is_llama:
                shapes[f"{prefix}.self_attn.{name}_proj.bias"] = (size,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, sizes["q"])
        if shape.experts:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = shapes[f"{prefix}.self_attn.k_norm.weight"] = (
                shape.head_dim,
            )
            shapes[f"{prefix}.mlp.gate.weight"] = (shape.experts, hidden)
        for mlp in [f"{prefix}.mlp.experts.{i}" for i in range(shape.experts)] or [f"{prefix}.mlp"]:
            shapes[f"{mlp}.gate_proj.weight"] = (inner, hidden)
            shapes[f"{mlp}.up_proj.weight"] = (inner, hidden)
            shapes[f"{mlp}.down_proj.weight"] = (hidden, inner)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if shape.is_llama:
        shapes["lm_head.weight"] = (shape.vocab, hidden)
    return shapes


def make_checkpoint(shape: Shape, parent: Path) -> Path:
    """A folder with config, tokenizer and bfloat16 weights; made once, then kept."""
    import torch
    from safetensors.torch import save_file

    folder = make_model_folder(shape, parent)
    weights = folder / "model.safetensors"
    if weights.exists():
        return folder
    rng = torch.Generator().manual_seed(_SEED)
    tensors = {
        name: torch.ones(size, dtype=torch.bfloat16)
        if "norm" in name
        else torch.empty(size).normal_(0.0, _STD, generator=rng).to(torch.bfloat16)
        for name, size in tensor_shapes(shape).items()
    }
    unfinished = weights.with_suffix(".unfinished")
    save_file(tensors, str(unfinished), metadata={"format": "pt"})
    unfinished.rename(weights)
    return folder

"""Trains the demo model: `python -m scripts.demo_model.train --out DIR --minutes N --seed S`.

A developer's tool, one process, CPU. It needs transformers (the dev extra), whose Llama module it trains, so
that the folder it writes is in Hugging Face's format by construction.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from common.model.hub import DEMO_MODEL_PATH
from scripts.demo_model.corpus import SPECIAL_TOKENS, make_corpus
from scripts.demo_model.samples import EXTRA_SAMPLES, SAMPLES, answer, scores
from scripts.demo_model.tokenizer import save_tokenizer, train_tokenizer

MAX_TOKENS = 2048
SHORT_WINDOW = 512
LONG_EVERY = 16
"""One batch out of this many is a single window of `MAX_TOKENS`, so that every position is trained."""

_BOS, _EOS, _SYSTEM, _USER, _ASSISTANT = range(len(SPECIAL_TOKENS))


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that a run depends on, beside the speed of the machine."""

    seed: int = 1
    minutes: float = 22.0
    """Wall time of the training loop; the learning rate follows it. Ignored if `steps` is set."""
    steps: int = 0
    num_documents: int = 100_000
    batch_tokens: int = 1024
    peak_lr: float = 2.5e-3
    warmup: float = 0.02
    """Share of the run in which the learning rate rises."""
    weight_decay: float = 0.05


def model_config(vocab_size: int) -> LlamaConfig:
    """Llama's architecture at a size that two cores can train: about 3.3 million parameters."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        bos_token_id=_BOS,
        eos_token_id=_EOS,
        pad_token_id=_EOS,
        rms_norm_eps=1e-5,
        initializer_range=0.05,
    )


def load_start(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Copy the weights of `folder` into `model`.

    A token that its tokenizer lacks gets the mean embedding of the tokens which spell it there.
    """
    before = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = before.state_dict()
    old = Tokenizer.from_file(str(folder / "tokenizer.json"))
    old_vocabulary = old.get_vocab()
    embeddings = weights["model.embed_tokens.weight"]
    rows: list[Tensor] = []
    for token_id in range(tokenizer.get_vocab_size()):
        token = tokenizer.id_to_token(token_id)
        if token in old_vocabulary:
            rows.append(embeddings[old_vocabulary[token]])
        else:
            text = tokenizer.decoder.decode([token])
            rows.append(embeddings[old.encode(text, add_special_tokens=False).ids].mean(0))
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = torch.stack(rows)
    model.load_state_dict(weights)


def earlier_runs(start: Path | None) -> list[dict[str, Any]]:
    """The runs that made the model in `start`, oldest first, as its training.json reports them."""
    if start is None:
        return []
    report = json.loads((start / "training.json").read_text(encoding="utf-8"))
    last = {key: report[key] for key in ("config", "steps", "trained_tokens", "wall_time_s")}
    return [*report.get("earlier_runs", []), last]


def answer_labels(ids: Tensor) -> Tensor:
    """`ids` [windows, length] with -100 where no loss is taken: what users and systems say, which cannot be predicted."""
    markers = torch.isin(ids, torch.tensor([_BOS, _SYSTEM, _USER, _ASSISTANT]))
    last_marker = torch.where(markers, torch.arange(ids.shape[1]), 0).cummax(1).values
    speaker = ids.gather(1, last_marker)
    return ids.masked_fill((speaker == _SYSTEM) | (speaker == _USER) | (ids == _ASSISTANT), -100)


def document_mask(ids: Tensor) -> Tensor:
    """[windows, 1, length, length] bool: causal, and no document sees the ones packed before it."""
    after_eos = torch.cat([torch.zeros_like(ids[:, :1], dtype=torch.bool), ids[:, :-1] == _EOS], 1)
    starts = (ids == _BOS) | (after_eos & ~torch.isin(ids, torch.tensor([_SYSTEM, _USER, _ASSISTANT])))
    document = starts.cumsum(1)
    same = document[:, None, :, None] == document[:, None, None, :]
    return same.tril()


def loss_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Mean cross-entropy of the answers and plain texts in `ids`. Long windows keep all their documents in sight."""
    mask = document_mask(ids) if ids.shape[1] == SHORT_WINDOW else None
    return model(input_ids=ids, labels=answer_labels(ids), attention_mask=mask).loss


def windows(documents: list[list[int]], length: int, rng: Random) -> Iterator[list[int]]:
    """Windows of `length` tokens without end, each from a document's start; the last document is cut to fit."""
    while True:
        window: list[int] = []
        while len(window) < length:
            window += rng.choice(documents)
        yield window[:length]


def batches(documents: list[list[int]], config: TrainingConfig, rng: Random) -> Iterator[Tensor]:
    """[windows, length] int64, `config.batch_tokens` tokens each, long windows apart."""
    short, long = windows(documents, SHORT_WINDOW, rng), windows(documents, MAX_TOKENS, rng)
    step = 0
    while True:
        step += 1
        source, length = (long, MAX_TOKENS) if step % LONG_EVERY == 0 else (short, SHORT_WINDOW)
        yield torch.tensor([next(source) for _ in range(max(1, config.batch_tokens // length))])


def learning_rate(progress: float, config: TrainingConfig) -> float:
    """Linear warm-up, then a cosine to 2 % of the peak; `progress` in [0, 1]."""
    if progress < config.warmup:
        return config.peak_lr * (progress + 1e-3) / (config.warmup + 1e-3)
    rest = (progress - config.warmup) / (1 - config.warmup)
    return config.peak_lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, rest))))


def mean_loss(model: LlamaForCausalLM, documents: list[list[int]], num_windows: int = 64) -> float:
    """Mean cross-entropy in nats per token over fixed windows of `documents`."""
    source = windows(documents, SHORT_WINDOW, Random(0))
    total = 0.0
    with torch.inference_mode():
        for _ in range(num_windows // 8):
            batch = torch.tensor([next(source) for _ in range(8)])
            total += float(loss_of(model, batch))
    return total / (num_windows // 8)


def make_optimizer(model: LlamaForCausalLM, config: TrainingConfig) -> torch.optim.AdamW:
    """AdamW; norms are not decayed."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=(0.9, 0.95), fused=True)


def fit(model: LlamaForCausalLM, source: Iterator[Tensor], config: TrainingConfig, out: Path) -> dict[str, float]:
    """Train in place; a checkpoint goes to `out` every two minutes. Returns the figures of the run."""
    optimizer = make_optimizer(model, config)
    began = last_save = time.monotonic()
    step, tokens, recent = 0, 0, 0.0
    while True:
        elapsed = time.monotonic() - began
        progress = step / config.steps if config.steps else elapsed / (60 * config.minutes)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, config)
        batch = next(source)
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        tokens += batch.numel()
        recent = loss.item() if step == 1 else 0.98 * recent + 0.02 * loss.item()
        if step % 25 == 0:
            print(f"{elapsed:7.1f} s  step {step:5d}  loss {recent:.4f}  {tokens / elapsed:.0f} tokens/s", flush=True)
        if time.monotonic() - last_save > 120:
            save_weights(model, out)
            last_save = time.monotonic()
    wall = round(time.monotonic() - began, 1)
    return {"steps": step, "trained_tokens": tokens, "wall_time_s": wall, "final_train_loss": round(recent, 4)}


def save_weights(model: LlamaForCausalLM, out: Path) -> None:
    """config.json, generation_config.json and model.safetensors in `out`: stored in bfloat16, computed with in float32."""
    half = LlamaForCausalLM(model.config)
    half.load_state_dict(model.state_dict())
    half.to(torch.bfloat16)  # pyright: ignore[reportArgumentType]
    half.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=[model.config.eos_token_id],
        pad_token_id=model.config.pad_token_id,
    )
    half.save_pretrained(out)
    # Readers that predate `rope_parameters` and `dtype` look for the old names. In float32 an answer does not depend on
    # what else its node computes meanwhile, or on which node continues it after a failure.
    path = out / "config.json"
    content = json.loads(path.read_text())
    content.update(rope_theta=content["rope_parameters"]["rope_theta"], dtype="float32", torch_dtype="float32")
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    # transformers leaves the weights readable by their owner only.
    (out / "model.safetensors").chmod(0o644)


def write_report(out: Path, report: dict[str, Any], tokenizer: Tokenizer, held_out: list[list[int]]) -> None:
    """training.json: how the model in `out` was trained and how good it is, measured on the saved weights."""
    model = LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    report["held_out_loss"] = round(mean_loss(model, held_out), 4)
    report["samples"] = [{"prompt": s.prompt, "answer": answer(model, tokenizer, s)} for s in SAMPLES + EXTRA_SAMPLES]
    report["scores"] = scores(model, tokenizer)
    (out / "training.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    for entry in report["samples"]:
        print(entry["prompt"], "->", entry["answer"])
    print(report["scores"])
    print(f"train loss {report['final_train_loss']}, held-out loss {report['held_out_loss']}")


def main() -> None:
    """Make the corpus, the tokenizer and the model; write them to `--out`."""
    defaults = TrainingConfig()
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, default=DEMO_MODEL_PATH, help="folder to write")
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="wall time to train for")
    parser.add_argument(
        "--steps", type=int, default=0, help="train for this many steps instead, which repeats a run exactly"
    )
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--start", type=Path, help="folder of an earlier model whose weights are the first ones")
    parser.add_argument("--peak-lr", type=float, default=defaults.peak_lr)
    parser.add_argument("--documents", type=int, default=defaults.num_documents, help="documents to generate")
    args = parser.parse_args()
    config = TrainingConfig(
        seed=args.seed,
        minutes=args.minutes,
        steps=args.steps,
        num_documents=args.documents,
        peak_lr=args.peak_lr,
    )

    torch.manual_seed(config.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    corpus = make_corpus(config.seed, config.num_documents)
    tokenizer = train_tokenizer(corpus.train)
    save_tokenizer(tokenizer, args.out, MAX_TOKENS)
    train, held_out = (
        [encoding.ids for encoding in tokenizer.encode_batch(part, add_special_tokens=False)]
        for part in (corpus.train, corpus.held_out)
    )
    model = LlamaForCausalLM(model_config(tokenizer.get_vocab_size()))
    if args.start is not None:
        load_start(model, tokenizer, args.start)
    report: dict[str, Any] = {
        "earlier_runs": earlier_runs(args.start),
        "config": asdict(config),
        "hardware": f"{os.cpu_count()} CPU cores",
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocab_size": tokenizer.get_vocab_size(),
        "train_documents": len(train),
        "train_characters": sum(map(len, corpus.train)),
        "train_tokens": sum(map(len, train)),
        "held_out_documents": len(held_out),
        "held_out_tokens": sum(map(len, held_out)),
    }
    print(json.dumps(report), flush=True)
    report |= fit(model, batches(train, config, Random(config.seed)), config, args.out)
    save_weights(model, args.out)
    write_report(args.out, report, tokenizer, held_out)


if __name__ == "__main__":
    main()

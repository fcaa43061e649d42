"""vLLM's command line: every option becomes ours, has no effect that is told, or is refused with what to use instead."""

from __future__ import annotations

import os
import shlex

import pytest
from support.paths import ROOT
from typer.testing import CliRunner

from common.base.errors import ConfigError
from common.config.cli import service_app
from common.config.fields import field_infos
from common.config.service_configs import UpConfig
from common.config.sources import Resolved
from kvrelay.up.vllm_command_line import translate
from kvrelay.up.vllm_options import OPTIONS, SAME, SHORT
from kvrelay.up.vllm_page import page

SWITCHES, LISTS = {"--enforce-eager", "--async-scheduling"}, {"--served-model-name", "--lora", "--model"}


def words(line: str) -> str:
    return shlex.join(translate(shlex.split(line), SWITCHES, LISTS).words)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("m -tp 2", "--prefill-tp 2 --decode-tp 2 m"),
        ("--tensor_parallel_size=2 m", "--prefill-tp 2 --decode-tp 2 m"),
        ("m -pp 2 -dp 3", "--decode-pp 2 --decode 3 m"),
        (
            "m --max-num-batched-tokens 8k --max-num-seqs 256",
            "--prefill-max-num-batched-tokens 8000 --decode-max-num-batched-tokens 8000 --max-num-seqs 256 m",
        ),
        ("m --max-model-len 32K", "--max-model-len 32768 m"),
        ("m --max-model-len 25.6k", "--max-model-len 25600 m"),
        ("m --max-model-len -1", "--max-model-len none m"),
        ("m --max-model-len auto", "--max-model-len none m"),
        ("m --kv-cache-memory-bytes 4G", "--kv-memory-gb 4.2949673 m"),
        ("m --dtype half", "--dtype float16 m"),
        ("m --dtype bfloat16", "--dtype bfloat16 m"),
        (
            "m -q awq --load-format safetensors --model-impl vllm",
            "--quantization auto --load-format auto --model-impl native m",
        ),
        ("m -q int8", "--quantization int8 m"),
        ("m --runner pooling --convert embed", "--task auto --task embed m"),
        ("m --generation-config vllm", "--generation-config none m"),
        ("ORG/NAME --revision abc", "ORG/NAME@abc"),
        ("--revision abc ORG/NAME", "ORG/NAME@abc"),
        ("m -sc ngram --num-speculative-tokens 5", "--speculate ngram --speculate-tokens 5 m"),
        ("--model m --port 1", "--port 1 m"),
        ("m --api-key a b", "--api-key a,b m"),
        ('m --lora-modules x=/x \'{"name": "y", "path": "/y"}\'', "--lora x=/x y=/y m"),
        ("m --served-model-name a b --port 1", "--served-model-name a b --port 1 m"),
        ("--enforce-eager m", "--enforce-eager m"),
        ("--no-enforce-eager m", "--no-enforce-eager m"),
        ("--enforce-eager false m", "--enforce-eager false m"),
        ("--gpu-memory-utilization 0.8 m", "--gpu-memory-utilization 0.8 m"),
        # of no effect, as many words as they have
        ("--enable-prefix-caching --trust-remote-code m", "m"),
        ("--enable-prefix-caching true m", "m"),
        ("--no-enable-chunked-prefill m", "m"),
        ("--swap-space 4 m -O3 -O 2 --compilation-config.mode 3", "m"),
        ("--cudagraph-capture-sizes 1 2 4 --port 1 m", "--port 1 m"),
        # refused options that ask for what is so anyway
        ("m --block-size 16 --nnodes 1 --cpu-offload-gb 0 --no-enable-sleep-mode --enable-eplb false", "m"),
        ("m --no-such-thing 3", "--no-such-thing 3 m"),
        ("m --help", "--help m"),
    ],
)
def test_words_become_ours(theirs: str, ours: str) -> None:
    assert words(theirs).replace("'", "") == ours


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("m --no-enable-prefix-caching", "--no-enable-prefix-caching: prefix caching cannot be switched off"),
        ("m --block-size 32", "1 option of vLLM is not taken: --block-size: blocks have 16 tokens"),
        ("m --hf-overrides {} --download-dir d", "2 options of vLLM are not taken: --hf-overrides: change the files"),
        ("m --kv-transfer-config {}", "on other hosts start kvrelay prefill and kvrelay decode"),
        ("m --download-dir /x", "--download-dir: set the variable HF_HUB_CACHE"),
        ("m --lora-modules {", "--lora-modules: '{' is not valid JSON"),
        ("m --lora-modules '[{}]'", "must be an object with name and path"),
        ("m --tensor-parallel-size", "--tensor-parallel-size needs a value"),
        ("m --config vllm.yaml", "--config: the file is TOML"),
        ("--revision x", "--revision needs a model"),
    ],
)
def test_what_cannot_be_had_is_refused_with_one_sentence(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        words(line)
    assert said in refused.value.message


def test_everything_in_the_table_holds_together() -> None:
    """Options that became ours since the table was written mean the same; words that others become exist."""
    ours = {"--" + name.replace("_", "-") for name in field_infos(UpConfig)}
    for name, option in OPTIONS.items():
        if option.does == "same":
            assert name == "config" or "--" + name in ours, name
        if option.does == "becomes" and name not in ("model", "revision"):
            value = "a=b" if name == "lora-modules" else "7"
            assert {word for word in option.convert([value]) if word.startswith("--")} <= ours, name
        assert option.says.strip(), name
    assert set(SHORT.values()) | set(SAME.split()) <= OPTIONS.keys()


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_no_option_of_vllm_ends_in_an_unknown_option(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leads to a configuration or to one sentence with exit code 78, and takes just the words that belong to it."""
    for variable in [name for name in os.environ if name.startswith("KVRELAY_")]:
        monkeypatch.delenv(variable)
    seen: list[Resolved[UpConfig]] = []
    app = service_app(UpConfig, help="", run=seen.append, name="serve", argument="model", translate=translate)
    value = {"switch": [], "value": ["1"], "values": ["1", "2"]}[OPTIONS[name].arity]
    result = CliRunner().invoke(app, [f"--{name}", *value, "--port", "7", *([] if name == "model" else ["my-model"])])
    assert result.exit_code in (0, 78), result.output
    if OPTIONS[name].does in ("ignored", "refused"):
        assert result.exit_code == (0 if OPTIONS[name].does == "ignored" or "1" in OPTIONS[name].neutral else 78)
    for resolved in seen:
        assert (resolved.config.port, resolved.config.model.partition("@")[0] != "") == (7, True)


def test_options_of_no_effect_are_told() -> None:
    told = translate(["m", "--enable-prefix-caching", "--swap-space", "4"], SWITCHES, LISTS).notes
    assert told == [
        "--enable-prefix-caching of vLLM has no effect: prefix caching is always on",
        "--swap-space of vLLM has no effect: CPU memory holds no KV of a GPU",
    ]


def test_the_page_is_that_of_the_table() -> None:
    assert (ROOT / "docs" / "vllm-options.md").read_text() == page(), (
        "python -m kvrelay.up.vllm_page > docs/vllm-options.md"
    )

"""The options of speculation. Pure data, in every process."""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.base.errors import ConfigError
from common.config.fields import option
from common.config.speculation import Speculation, parse_speculation


@dataclass(frozen=True, kw_only=True)
class SpeculateOption:
    """How the tokens of a stream are guessed."""

    speculate: str = option(
        "off",
        "Guess the next tokens of each stream and verify them in one step: suffix (what followed the same tokens before in the "
        "prompt and the answer), ngram (only the latest such place), draft:MODEL (a small model with the same "
        "vocabulary), mtp (the model's own layer for it), eagle:PATH (an EAGLE-3 head), auto (suffix) or off. Prefill nodes "
        "need mtp and eagle:PATH too. The answers are the same; where guesses do not pay, fewer or none are made.",
        "Speculation",
        "--speculative-config",
    )


@dataclass(frozen=True, kw_only=True)
class SpeculationOptions(SpeculateOption):
    """How decode nodes compute several tokens of a stream in one step."""

    speculate_tokens: int = option(
        16, "Maximum number of tokens guessed for one stream in one step.", "Speculation", low=1, high=128
    )
    speculate_answers: int = option(
        0,
        "Number of tokens of recent answers that suffix and ngram search too; 0: none. A client's guesses come only from answers to "
        "its own API key (without keys: its address). A token takes 300 bytes.",
        "Speculation",
        low=0,
        high=10_000_000,
    )

    @property
    def speculation(self) -> Speculation | None:
        """None: nothing is guessed. Raises: ConfigError."""
        found = parse_speculation(self.speculate, self.speculate_tokens)
        if self.speculate_answers and (found is None or found.method not in ("suffix", "ngram")):
            raise ConfigError("--speculate-answers needs --speculate suffix or ngram, which search these answers")
        return found and replace(found, max_answer_tokens=self.speculate_answers)

"""Reads the parameters of OpenAI, vLLM and llama.cpp that say how tokens are chosen and when a reply ends."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field

from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.server.checked import ANY, Checked, Neutral

MOST_STOPS = 64
MOST_STOP_CHARACTERS = 256
_MOST_IDS = 1024
_LEAST_BIAS = -100
_LEAST_TOP_P = 1e-9
_COLDEST = 1e-4
"""Lower temperatures count as 0. Logits divided by them would leave the range of float32."""

DEFAULTS = Sampling(temperature=1.0)

OF_VLLM: Neutral = {
    "add_special_tokens": (False,),
    "bad_words": ([],),
    "early_stopping": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1, 1.0),
    "return_tokens_as_token_ids": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}
OF_LLAMA_CPP: Neutral = {
    "cache_prompt": (True,),
    "dry_allowed_length": ANY,  # This and all other `dry_` parameters have no effect without their multiplier.
    "dry_base": ANY,
    "dry_multiplier": (0, 0.0),
    "dry_penalty_last_n": ANY,
    "dry_sequence_breakers": ANY,
    "dynatemp_exponent": ANY,
    "dynatemp_range": (0, 0.0),
    # A slot is a place for a prefix. This server needs no slots, because it keeps every prefix by its tokens.
    "id_slot": ANY,
    "min_keep": (0,),
    "mirostat": (0,),
    "mirostat_eta": ANY,
    "mirostat_tau": ANY,
    "n_indent": (0,),
    "n_keep": (0, -1),
    "post_sampling_probs": (False,),
    "repeat_last_n": (-1,),
    "typical_p": (1, 1.0),
    "xtc_probability": (0, 0.0),
    "xtc_threshold": ANY,
}


def _read_stop(value: object) -> object:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(_is_stop(stop) for stop in stops):
        raise ValueError(
            f"it must be a string or up to {MOST_STOPS} of them, each of 1 to {MOST_STOP_CHARACTERS} characters"
        )
    return tuple(stops)


def _is_stop(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MOST_STOP_CHARACTERS


def _read_ids(value: object) -> object:
    if not isinstance(value, list) or len(value) > _MOST_IDS or not all(type(i) is int and i >= 0 for i in value):
        raise ValueError(f"it must be a list of up to {_MOST_IDS:,} token ids")
    return tuple(value)


def _read_bias(value: object) -> object:
    """Read a bias for each token id.

    In OpenAI's form, ids are the keys of a JSON object, so they are strings. In llama.cpp's form, the value is a list
    of pairs of an id and its bias, where the bias `false` means that the token is never chosen.
    """
    if isinstance(value, list):
        value = dict(map(_read_pair, value[: _MOST_IDS + 1]))
    if not isinstance(value, dict) or len(value) > _MOST_IDS:
        raise ValueError(f"it must be an object of up to {_MOST_IDS:,} token ids, each with its bias")
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError(f"its keys are token ids, such as '42', not {str(key)[:20]!r}")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise ValueError("a bias is a number from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


def _read_pair(pair: object) -> tuple[str, object]:
    if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) is not int:
        raise ValueError("as a list, it has pairs of a token id and its bias, such as [42, -1]")
    return str(pair[0]), _LEAST_BIAS if pair[1] is False else pair[1]


def _read_top_p(value: object) -> object:
    """Read a top_p of 0 as the smallest possible share, which leaves the likeliest token only."""
    return _LEAST_TOP_P if type(value) in (int, float) and value == 0 else value


def _read_seed(value: object) -> object:
    return None if value == -1 else value  # llama.cpp's clients write -1 for a random seed.


def _read_top_k(value: object) -> object:
    return None if type(value) is int and value in (0, -1) else value


class SamplingFields(Checked):
    """Holds the parameters that say how tokens are chosen and when a reply ends.

    Some parameters are not OpenAI's. `top_k`, `min_p`, `repetition_penalty`, `stop_token_ids`, `ignore_eos`,
    `min_tokens` and `priority` mean what they mean in vLLM. `deadline_seconds` ends a reply as `max_tokens` does.
    """

    neutral: ClassVar[Neutral] = OF_VLLM | OF_LLAMA_CPP
    aliases: ClassVar[dict[str, str]] = {"repeat_penalty": "repetition_penalty"}

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: Annotated[float | None, Field(gt=0, le=1), BeforeValidator(_read_top_p)] = None
    top_k: Annotated[int | None, Field(ge=1, le=2**31), BeforeValidator(_read_top_k)] = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.1, le=10)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[int, float], BeforeValidator(_read_bias)] = Field(default_factory=dict)
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63), BeforeValidator(_read_seed)] = None
    stop: Annotated[tuple[str, ...], BeforeValidator(_read_stop)] = ()
    stop_token_ids: Annotated[tuple[int, ...], BeforeValidator(_read_ids)] = ()
    ignore_eos: bool = False
    min_tokens: int = Field(0, ge=0)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    deadline_seconds: float | None = Field(None, gt=0)

    def sampling(self, choice: int, defaults: Sampling = DEFAULTS) -> Sampling:
        """Return the sampling of one choice.

        Each choice has its own seed, which follows from the request's seed if there is one.

        Args:
            defaults: the values of options that the request leaves out.
        """
        temperature = defaults.temperature if self.temperature is None else self.temperature
        return Sampling(
            temperature=temperature if temperature >= _COLDEST else 0.0,
            top_k=self.top_k if "top_k" in self.model_fields_set else defaults.top_k,
            top_p=self.top_p or defaults.top_p,
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            repetition_penalty=self.repetition_penalty or defaults.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            min_tokens=self.min_tokens,
            length_decay=None if self.ignore_eos else defaults.length_decay,
            seed=None if self.seed is None else self.seed + choice,
        )

    def stop_ids(self, end_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens that end the reply. `end_ids` are the model's."""
        return (*(() if self.ignore_eos else end_ids), *self.stop_token_ids)

"""Turns the fields of a request into arguments for the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridmem.chat.engine.output import PLAIN, Output
from hybridmem.chat.sampling.sampling import Sampling
from hybridmem.chat.server.errors import ApiError
from hybridmem.chat.server.replies import PromptRequest
from hybridmem.chat.server.sampled import SamplingFields


@dataclass(frozen=True)
class Asking:
    """Makes requests to the engine for one model.

    Attributes:
        end_ids: the tokens that end a reply of the model.
        n_vocab: how many tokens the model knows.
        defaults: the values of options that requests leave out.
    """

    end_ids: tuple[int, ...]
    n_vocab: int
    defaults: Sampling

    def prompt_request(
        self, asked: SamplingFields, token_ids: list[int], max_tokens: int, owner: bytes, *, n: int = 1,
        output: Output = PLAIN, reports_prefill: bool = False,
    ) -> PromptRequest:  # fmt: skip
        """Return the arguments of the engine for one prompt.

        Raises ApiError 400 for tokens that the model does not know.
        """
        for param, ids in (("stop_token_ids", asked.stop_token_ids), ("logit_bias", asked.logit_bias)):
            if wrong := [i for i in ids if i >= self.n_vocab]:
                message = f"Invalid '{param}': it has token {wrong[0]}, and token ids are 0 ... {self.n_vocab - 1}."
                raise ApiError(400, message, param=param, code="invalid_value")
        return PromptRequest(
            token_ids=token_ids,
            max_tokens=max_tokens,
            stop=asked.stop,
            samplings=tuple(asked.sampling(choice, self.defaults) for choice in range(n)),
            owner=owner,
            output=replace(output, stop_ids=asked.stop_ids(self.end_ids)),
            reports_prefill=reports_prefill,
            priority=-asked.priority,  # In requests, a lower number goes first, as in vLLM.
            deadline_s=asked.deadline_seconds,
        )

"""Single numbers of tensors in few bits equal those of the whole tensor's floats."""

from __future__ import annotations

import pytest
import torch

from hybridmem.models.weights.coded import CodedTensor
from hybridmem.models.weights.gguf_forms import FORMS
from tests.extent import few_cases
from tests.models.weights.test_gguf_forms import PLAIN, drawn, drawn_plain


def coded(name: str) -> CodedTensor:
    return drawn(name, 8, 3) if name in FORMS else drawn_plain(name, 8, 96, torch.bfloat16)


@few_cases
@pytest.mark.parametrize("name", [*FORMS, *PLAIN])
def test_numbers_at_places_are_those_of_the_floats(name: str) -> None:
    own = coded(name)
    for each in (own, own.view(4, 2, -1).transpose(0, 1), own[::3]):
        assert isinstance(each, CodedTensor)
        at = torch.randint(0, each.numel(), (200,))
        assert torch.equal(each.take_at(at), each.dense().flatten()[at])

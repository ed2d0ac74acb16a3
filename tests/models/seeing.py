"""Random checkpoints of models that see, as transformers writes them, and pictures for them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel, Qwen3_5Config
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hybridmem.models.vision.pictures import Picture, Pictures
from tests.models.checkpoints import randomise_
from tests.models.families.qwen3_5 import SHARES, qwen3_5_config

EYES = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24,
    "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip
PLACEHOLDER = 3


def write_seeing(folder: Path, *, placeholder: int = PLACEHOLDER, **text: Any) -> PreTrainedModel:
    """Write a small Qwen3.5 that sees, with its image processor, and return transformers' model.

    Args:
        placeholder: the token that stands for a row; those behind it stand for videos, and around pictures.
    """
    inner = qwen3_5_config(rope_parameters=SHARES, **text).to_dict()
    config = Qwen3_5Config(
        text_config=inner, vision_config=EYES, image_token_id=placeholder, video_token_id=placeholder + 1,
        vision_start_token_id=placeholder + 2, vision_end_token_id=placeholder + 3,
    )  # fmt: skip
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(config).eval()
    randomise_(model)
    model.save_pretrained(folder)
    sizes = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=sizes).save_pretrained(folder)
    return model


def draw_picture(seed: int, width: int = 48, height: int = 24) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def as_png(image: Image.Image) -> bytes:
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def joined(*parts: int | Picture) -> list[int]:
    """Return the token ids of tokens and pictures."""
    return [id for part in parts for id in ([part] if isinstance(part, int) else part.token_ids())]


@torch.no_grad()
def logits_of_peer(
    peer: PreTrainedModel, pictures: Pictures, parts: list[int | Picture], images: list[Image.Image]
) -> Tensor:
    """Return transformers' logits for a prompt whose pictures, in order, are these images."""
    ids = torch.tensor([[PLACEHOLDER if id >= 1 << 62 else id for id in joined(*parts)]])
    inputs = [pictures.processor(images=[image], return_tensors="pt") for image in images]
    seen = {name: torch.cat([each[name] for each in inputs]) for name in inputs[0]}
    logits: Tensor = peer(input_ids=ids, mm_token_type_ids=(ids == PLACEHOLDER).int(), **seen).logits[0]
    return logits

"""Writes random checkpoints of models that see, as transformers does, and pictures for them."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from transformers import (
    AutoModelForImageTextToText,
    Lfm2VlConfig,
    Lfm3VlConfig,
    MiniCPMV4_6Config,
    MiniCPMV4_7Config,
    NemotronH_Omni_Reasoning_V3_Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen4ExpConfig,
)
from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hybridmem.models.vision.pictures import Picture, Pictures
from tests.models.checkpoints import randomise_
from tests.models.families.glm5_next import glm5_next_config
from tests.models.families.lfm2 import lfm2_config
from tests.models.families.lfm3 import lfm3_config
from tests.models.families.nemotron_h import nemotron_config
from tests.models.families.qwen3_5 import SHARES, qwen3_5_config, qwen3_5_moe_config
from tests.models.families.qwen4_exp import qwen4_exp_config

EYES = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 24,
    "num_position_embeddings": 16, "patch_size": 4,
}  # fmt: skip
RADIO_EYES = {
    "model_type": "radio", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 32, "max_img_size": 64, "num_cls_tokens": 2, "num_registers": 2, "video_temporal_patch_size": 2,
}  # fmt: skip
CANVAS_EYES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 32,
}  # fmt: skip
PLACEHOLDER = 3


def write_qwen3_5(folder: Path, *, placeholder: int = PLACEHOLDER, **text: Any) -> PreTrainedModel:
    """Write a small Qwen3.5 that sees, with its image processor, and return transformers' model. So do those below.

    Args:
        placeholder: the token that stands for a row. The three ids after it stand for a row of a video, and for the
            begin and the end of a picture.
        text: fields of the language model's config.
    """
    config = Qwen3_5Config(
        text_config=qwen3_5_config(rope_parameters=SHARES, **text).to_dict(), vision_config=EYES, **_around(placeholder)
    )
    model = _write(folder, config)
    _write_processor(folder)
    return model


def write_moe(folder: Path, *, placeholder: int = PLACEHOLDER, **text: Any) -> PreTrainedModel:
    config = Qwen3_5MoeConfig(
        text_config=qwen3_5_moe_config(rope_parameters=SHARES, **text).to_dict(), vision_config=EYES,
        **_around(placeholder),
    )  # fmt: skip
    model = _write(folder, config)
    _write_processor(folder)
    return model


def write_qwen4_exp(folder: Path, *, placeholder: int = PLACEHOLDER, **text: Any) -> PreTrainedModel:
    config = Qwen4ExpConfig(
        text_config=qwen4_exp_config(rope_parameters=SHARES, **text).to_dict(), vision_config=EYES,
        **_around(placeholder),
    )  # fmt: skip
    model = _write(folder, config)
    _write_processor(folder)
    return model


def write_lfm2_vl(folder: Path, *, placeholder: int = PLACEHOLDER, **text: Any) -> PreTrainedModel:
    eyes = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
        "num_patches": 16, "vision_use_head": False,
    }  # fmt: skip
    config = Lfm2VlConfig(
        text_config=lfm2_config(**text).to_dict(), vision_config=eyes, image_token_id=placeholder,
        projector_hidden_size=12,
    )  # fmt: skip
    return _write(folder, config)


def write_lfm3_vl(folder: Path, *, placeholder: int = PLACEHOLDER, **text: Any) -> PreTrainedModel:
    eyes = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
        "num_key_value_heads": 1, "patch_size": 4, "layer_types": ["conv", "full_attention", "conv"],
    }  # fmt: skip
    config = Lfm3VlConfig(
        text_config=lfm3_config(**text).to_dict(), vision_config=eyes, projector_hidden_size=12, **_around(placeholder)
    )
    model = _write(folder, config)
    _write_processor(folder)
    return model


def write_nemotron_h_omni(folder: Path, *, placeholder: int = PLACEHOLDER, **text: Any) -> PreTrainedModel:
    ears = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "projection_hidden_size": 16}
    ears |= {"projection_bias": False}
    options = {"num_nextn_predict_layers": 1} | text  # With this option, the tower's output is normed.
    config = NemotronH_Omni_Reasoning_V3_Config(
        text_config=nemotron_config(**options).to_dict(), vision_config=RADIO_EYES, vision_hidden_size=16,
        projector_hidden_size=12, image_token_id=placeholder, video_token_id=placeholder + 1,
        audio_token_id=placeholder + 4, audio_config=ears,
    )  # fmt: skip
    return _write(folder, config)


def write_minicpm_v(
    folder: Path, *, placeholder: int = PLACEHOLDER, marks: dict[str, int] | None = None, **text: Any
) -> PreTrainedModel:
    """Write a small MiniCPM-V 4.7.

    Args:
        marks: the tokens around parts of pictures; as far behind the placeholder as in `MARKS` unless given.
    """
    marks = marks or {name: token + placeholder - PLACEHOLDER for name, token in MARKS.items()}
    config = MiniCPMV4_7Config(
        text_config=qwen3_5_config(rope_parameters=SHARES, **text).to_dict(), vision_config=CANVAS_EYES,
        insert_layer_id=1, image_token_id=placeholder, **marks,
    )  # fmt: skip
    model = _write(folder, config)
    MiniCPMV4_6ImageProcessorPil(patch_size=4, scale_resolution=48, max_slice_nums=4).save_pretrained(folder)
    return model


def write_minicpm_v_4_6(folder: Path, *, placeholder: int = PLACEHOLDER, **text: Any) -> PreTrainedModel:
    config = MiniCPMV4_6Config(
        text_config=qwen3_5_config(rope_parameters=SHARES, **text).to_dict(), vision_config=CANVAS_EYES,
        insert_layer_id=1, image_token_id=placeholder, video_token_id=placeholder + 1,
    )  # fmt: skip
    model = _write(folder, config)
    MiniCPMV4_6ImageProcessorPil(patch_size=4, scale_resolution=48, max_slice_nums=4).save_pretrained(folder)
    return model


def write_glm5_next(folder: Path, *, placeholder: int = PLACEHOLDER, **text: Any) -> PreTrainedModel:
    config = glm5_next_config(**text)
    eyes = config.vision_config
    eyes.patch_size, eyes.image_size, eyes.out_hidden_size, eyes.depth = 4, 32, config.text_config.hidden_size, 2
    config.image_token_id, config.video_token_id = placeholder, placeholder + 1
    config.image_start_token_id, config.image_end_token_id = placeholder + 2, placeholder + 3
    config.video_start_token_id, config.video_end_token_id = placeholder + 48, placeholder + 49
    model = _write(folder, config)
    Glm5NextImageProcessorPil(patch_size=4, min_image_tokens=2, max_image_tokens=24).save_pretrained(folder)
    return model


def _around(placeholder: int) -> dict[str, int]:
    names = "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"
    return {name: placeholder + i for i, name in enumerate(names)}


WRITERS: dict[str, Callable[..., PreTrainedModel]] = {
    "qwen3.5": write_qwen3_5, "qwen3.5-moe": write_moe, "lfm2-vl": write_lfm2_vl, "lfm3-vl": write_lfm3_vl,
    "nemotron-h-omni": write_nemotron_h_omni, "minicpm-v": write_minicpm_v, "qwen4-exp": write_qwen4_exp,
    "minicpm-v-4.6": write_minicpm_v_4_6, "glm5-next": write_glm5_next,
}  # fmt: skip
SPECIAL = {"<|image_start|>": 5, "<|image_end|>": 6, "<|img_thumbnail|>": 9, "<|img_row_1_col_1|>": 10}
SPECIAL |= {"<|img_row_1_col_2|>": 11, "<img>": 12, "</img>": 13}
SPECIAL |= {"<image_id>": 31, "</image_id>": 50, "0": 26, "1": 36, "2": 24}
LINE_BREAK = 17
SPECIAL |= {"<image>": 5, "</image>": 6, "<slice>": 14, "</slice>": 16, "\u010a": LINE_BREAK}
MARKS = {
    "image_start_id": 5, "image_end_id": 6, "slice_start_id": 14, "slice_end_id": 16, "newline_id": LINE_BREAK,
}  # fmt: skip
"""Tokens of MiniCPM-V 4.7 around parts of pictures."""


class TileProcessor:
    """Makes what the image processor of LFM2-VL makes, without torchvision: a wide picture is two tiles and a small
    copy of the whole.
    """

    return_row_col_info = False

    def __call__(self, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        (image,) = images
        parts, columns = [image.resize((24, 16))], 1
        if image.width > 60:
            tile = image.resize((32, 16))
            parts, columns = [tile.crop((0, 0, 16, 16)), tile.crop((16, 0, 32, 16)), *parts], 2
        patches = [self._patches(part) for part in parts]
        most = max(map(len, patches))
        mask = torch.tensor([[1] * len(each) + [0] * (most - len(each)) for each in patches])
        return {
            "pixel_values": torch.stack([pad(each, (0, 0, 0, most - len(each))) for each in patches]),
            "pixel_attention_mask": mask,
            "spatial_shapes": torch.tensor([[part.height // 4, part.width // 4] for part in parts]),
            "image_rows": [1], "image_cols": [columns],
        }  # fmt: skip

    def _patches(self, part: Image.Image) -> Tensor:
        return rearrange(pixels_of(part), "(h p) (w q) c -> (h w) (p q c)", p=4, q=4)


class GridProcessor:
    """Makes what the image processor of Nemotron 3 Omni makes, without torchvision: patches of a grid."""

    def __call__(self, images: list[Image.Image], **_: Any) -> dict[str, Any]:
        (image,) = images
        image = image.resize((48, 32) if image.width > 60 else (16, 24))
        patches = rearrange(pixels_of(image), "(h p) (w q) c -> (h w) (c p q)", p=4, q=4)
        return {"pixel_values": patches, "image_grid_hw": torch.tensor([[image.height // 4, image.width // 4]])}


PROCESSORS = {"Lfm2Vl": TileProcessor, "NemotronHOmni": GridProcessor}
"""Classes whose image processor needs torchvision -> what stands in for it."""


def pixels_of(image: Image.Image) -> Tensor:
    """Return (height, width, 3) numbers from -1 to 1."""
    return torch.from_numpy(np.asarray(image).copy()).float() / 127.5 - 1


def _write(folder: Path, config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(config).eval()
    randomise_(model)
    model.save_pretrained(folder)
    return model


def _write_processor(folder: Path) -> None:
    sizes = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
    Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=sizes).save_pretrained(folder)


def draw_picture(seed: int, width: int = 48, height: int = 24) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def as_png(image: Image.Image) -> bytes:
    written = io.BytesIO()
    image.save(written, "PNG")
    return written.getvalue()


def joined(*parts: int | Picture) -> list[int]:
    """Return the token ids of tokens and pictures."""
    return [id for part in parts for id in ([part] if isinstance(part, int) else part.token_ids(SPECIAL.get))]


@torch.no_grad()
def logits_of_peer(
    peer: PreTrainedModel, pictures: Pictures, parts: list[int | Picture], images: list[Image.Image]
) -> Tensor:
    """Return transformers' logits for a prompt whose pictures, in order, are these images."""
    inputs = [pictures.processor(images=[image], return_tensors="pt") for image in images]
    is_sliced = peer.config.model_type in ("minicpmv4_6", "minicpmv4_7")
    if is_sliced:
        ids = torch.tensor([_canvas_ids(parts, inputs, pictures.processor.use_image_id)])
    else:
        ids = torch.tensor([[PLACEHOLDER if id >= 1 << 62 else id for id in joined(*parts)]])
    tensors = [name for name, value in inputs[0].items() if isinstance(value, Tensor)]
    most = max(each["pixel_values"].shape[-2] for each in inputs)
    is_padded = "pixel_attention_mask" in tensors
    for each in inputs if is_padded else ():
        n = most - each["pixel_values"].shape[-2]
        each["pixel_values"] = pad(each["pixel_values"], (0, 0, 0, n))
        each["pixel_attention_mask"] = pad(each["pixel_attention_mask"], (0, n))
    seen = {
        name: torch.cat([each[name] for each in inputs], -1 if is_sliced and name == "pixel_values" else 0)
        for name in tensors
    }
    if peer.config.model_type in ("qwen3_5", "qwen3_5_moe", "qwen4_exp", "minicpmv4_7"):
        seen["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
    logits: Tensor = peer(input_ids=ids, **seen).logits[0]
    return logits


def _canvas_ids(parts: list[int | Picture], inputs: list[Any], is_numbered: bool) -> list[int]:
    """Return the ids that transformers' processor of MiniCPM-V 4.7 makes of a prompt."""
    ids, at = list[int](), iter(enumerate(inputs))
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        number, each = next(at)
        numbers = [SPECIAL["<image_id>"], SPECIAL[str(number)], SPECIAL["</image_id>"]]
        whole, *slices = [[PLACEHOLDER] * (int(size.prod()) // 16) for size in each["target_sizes"]]
        ids += [*(numbers if is_numbered else []), 5, *whole, 6]
        for i, rows in enumerate(slices):
            ids += [LINE_BREAK] if i and i % each["grids"][0][1] == 0 else []
            ids += [14, *rows, 16]
    return ids

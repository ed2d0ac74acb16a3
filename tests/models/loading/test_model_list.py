"""The list of transformers' models is made once. It is the list that transformers' own package of models would make."""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers.utils import import_utils

from hybridmem.models.loading import model_list


def test_the_package_of_models_gets_the_list_that_it_would_make() -> None:
    folder = Path(transformers.__file__).parent / "models"
    place = str(folder / "__init__.py")
    make = import_utils.define_import_structure
    made: list[object] = []

    def noted(*arguments: object, **named: object) -> object:
        made.append(arguments)
        return make(*arguments, **named)

    assert model_list._list(noted, folder, place) == make(place)
    assert made == [(folder,)], "the list with a prefix, which transformers has made at its import"
    for other in (folder / "llama" / "__init__.py", folder / "auto" / "__init__.py"):
        assert model_list._list(make, folder, str(other)) == make(str(other))


def test_the_function_of_transformers_is_as_before_afterwards() -> None:
    make = import_utils.define_import_structure
    model_list.import_models()
    assert import_utils.define_import_structure is make

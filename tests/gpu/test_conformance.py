"""The conformance suite runs on a CUDA device: the tests are the same, and `subject` is on the device."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from tests.conformance.test_away import *  # noqa: F403
from tests.conformance.test_rollback import *  # noqa: F403
from tests.conformance.test_sequences import *  # noqa: F403

pytestmark = pytest.mark.gpu
